"""The resident loop: a super-model that stays, and whose jobs join and leave at round boundaries.

All ranks apply the same commands behind the same round: the first rank's mail is sent to the others
while a round computes, and carried out behind it.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from tlora_megatron.training.driven.clients import Clients, NoClients
from tlora_megatron.training.resident.desk import DrivenDesk
from tlora_megatron.training.resident.live_loop import LiveLoop, Tell
from tlora_megatron.training.resident.mail import (
    Agreement,
    Mail,
    Mailbox,
    Readiness,
    gather_texts,
)
from tlora_megatron.training.resident.staging import Failed, StagedJob, Stager
from tlora_megatron.training.run.frozen_gc import frozen_gc

logger = logging.getLogger(__name__)

_IDLE_S = 10.0
"""An idle loop looks so often whether it still may do what it does."""
_BUSY_S = 0.02
"""It looks so often while a job is prepared."""
_MORE_S = 0.5
"""It waits so long for mail that is announced: who joins behind the first round's begin waits for
its end, which takes seconds in a new process."""
_OWNED_S = 0.5
"""A busy loop looks so often whether it still may write its jobs' files, a read for each job.
Nothing is written without a look of its own."""
_LOOK_S, _LOOKED_AT = 0.005, 16
"""An idle loop looks so often for requests of so many driven jobs; of more, less often."""


class ResidentLoop:
    """Runs rounds and carries out commands, until it is told to stop.

    Args:
        stager: prepares jobs beside the rounds.
        group: of gloo over the world, for this loop alone; None = a world of one.
        tell: is told of events, on the writer; of memory that is gone on any rank.
        may_write: asked on the writer whether it still owns a job's files; a job of which it says
            no leaves at the next boundary, and nothing more is written of it.
        clients: who keeps the requests of driven jobs; None = there are no such jobs.
        round_every_s: seconds between two events of the kind `round`.
    """

    def __init__(
        self,
        live: LiveLoop,
        stager: Stager,
        group: dist.ProcessGroup | None,
        tell: Tell,
        *,
        clients: Clients | None = None,
        round_every_s: float = 2.0,
    ) -> None:
        self.live = live
        self.desk = DrivenDesk(live, clients or NoClients())
        self._stager = stager
        self._group = group
        self._any_rank_tells = tell
        is_writer = live.super_model.groups.is_writer
        self._tell: Tell = tell if is_writer else (lambda *_: None)
        self._may_write = live.files.may_write
        self._agreement = Agreement(group)
        self._preparing: list[str] = []
        """Jobs that some rank may still be preparing; the same on all ranks."""
        self._waiting: dict[str, None] = {}
        """Jobs that join as soon as they are prepared."""
        self._rates = _Rates(round_every_s)
        self._looked_s = -math.inf
        self._has_stopped = False

    def serve(self, mailbox: Mailbox | None) -> None:
        """Runs until a command stops it, maybe not for the first time; every rank calls it.

        Args:
            mailbox: where commands come in, on the first rank; None on the others.
        """
        self._has_stopped = False
        with frozen_gc():
            while not self._has_stopped:
                try:
                    self._turn(mailbox)
                except torch.OutOfMemoryError:
                    newcomers = {"newcomers": self.live.newcomers}
                    self._any_rank_tells("out_of_memory", None, newcomers)
                    raise

    def _turn(self, mailbox: Mailbox | None) -> None:
        """A round, if there is one, and what is carried out behind it."""
        is_idle = not (self.live.has_work or self.desk.has_work)
        word = self._word(mailbox, is_idle=is_idle)
        states = {name: self._stager.state(name) for name in self._preparing}
        ready = Readiness(self._group, states) if states else None
        loads = self.desk.loads()
        loaded = Readiness(self._group, loads) if loads else None
        self._agreement.begin(word)
        if not is_idle:
            self._work()
        word, found = self._agreement.read(), ready.read() if ready else {}
        self.desk.advance(word["asked"], loaded.read() if loaded else {})
        self._at_boundary(word, found)

    def close(self) -> None:
        """Ends threads and closes files; a second call does nothing."""
        self._stager.close()
        self.live.close()

    def _word(self, mailbox: Mailbox | None, *, is_idle: bool) -> dict[str, Any] | None:
        """Returns the first rank's word for the boundary behind the round that begins."""
        if mailbox is None:
            return None
        if is_idle:
            self._rest(mailbox)
        mail = list(mailbox.take())
        while is_idle and mail and (mail[-1].get("body") or {}).get("more"):
            if not mailbox.wait(_MORE_S):
                break
            mail += mailbox.take()
        return {
            "mail": mail,
            "lost": self._lost(),
            "save": self.live.due_by_time(),
            "asked": self.desk.news(),
        }

    def _lost(self) -> list[str]:
        """Jobs whose files are somebody else's by now, if it is time to look."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _OWNED_S:
            return []
        self._looked_s = now_s
        return [name for name in self.live.names() if not self._may_write(name)]

    def _rest(self, mailbox: Mailbox) -> None:
        """Waits for mail or for a request; tells what has been written meanwhile."""
        if not self.desk.jobs:
            self.live.drain()  # nobody waits
            mailbox.wait(_BUSY_S if self._preparing else _IDLE_S)
            return
        self.live.saver.report()
        is_short = self._preparing or self.desk.is_held_up or self.live.saver.is_busy
        end_s = time.monotonic() + (_BUSY_S if is_short else _IDLE_S)
        look_s = _LOOK_S * max(1.0, len(self.desk.jobs) / _LOOKED_AT)
        while not self.desk.has_news and not mailbox.wait(look_s):
            if time.monotonic() > end_s:
                return

    def _work(self) -> None:
        """A round, and a micro-batch of an evaluation."""
        begin_s = time.perf_counter()
        self.live.run_round()
        self.live.evaluate_part()
        self.desk.forward_part()
        self._rates.add(time.perf_counter() - begin_s, self.live.tokens)
        if (found := self._rates.take(self.live)) is not None:
            self._tell("round", None, found)

    def _at_boundary(self, word: dict[str, Any], ready: dict[str, bool]) -> None:
        """Carries out what the ranks have agreed on, in the same order on all of them."""
        begin_s, joined = time.perf_counter(), []
        for name in word["lost"]:
            self.live.leave(name, save=False, lost=True)
        if word["save"]:
            self.live.save_jobs(word["save"])
        for name, is_ready in ready.items():
            self._note_prepared(name, is_ready)
        for mail in word["mail"]:
            self._carry_out(mail)
        for name in list(self._waiting):
            if name in self._preparing:
                continue
            del self._waiting[name]
            joined.append(self._join(name))
        if joined:
            gc.freeze()
            stall_s = time.perf_counter() - begin_s
            for name, step in joined:
                facts = {"round": self.live.rounds, "from_step": step, "stall_s": stall_s}
                self._tell("joined", name, facts)
        for mail in word["mail"]:
            if "seq" in mail:
                self._tell("applied", mail.get("job"), {"seq": mail["seq"]})
        if self._has_stopped:
            self.live.drain()
            self.desk.flush()
            self._tell("stopped", None, {})

    def _carry_out(self, mail: Mail) -> None:
        kind, name, body = mail["kind"], mail.get("job"), mail.get("body") or {}
        if kind == "prepare":
            self._prepare(str(name), body)
        elif kind == "join":
            self._ask_to_join(str(name))
        elif kind == "leave":
            self._leave(str(name), save=bool(body.get("save", True)))
        elif kind == "save":
            self.live.save_active()
        elif kind == "stop":
            self._stop(save=bool(body.get("save", True)))
        elif kind != "renew":
            self._tell("note", name, {"message": f"command {kind!r} is not known here"})

    def _prepare(self, name: str, order: Mail) -> None:
        if name in self.live.names():
            self._refuse(name, f"job {name!r} trains here already")
        elif name not in self._stager:  # the same order twice is one
            self._stager.order(name, {**order, "job": name})
            self._preparing.append(name)

    def _note_prepared(self, name: str, is_ready: bool) -> None:
        """Takes note of what all ranks have found; a job that some rank refuses is gone."""
        if name not in self._stager or name not in self._preparing:
            return
        self._preparing.remove(name)
        found = self._stager.found(name)
        if is_ready and isinstance(found, StagedJob):
            facts = {"num_steps": found.state.plan.num_steps, "from_step": found.state.step}
            self._tell("prepared", name, {"digest": found.digest, **facts})
            return
        own = found.error if isinstance(found, Failed) else ""
        reasons = [text for text in gather_texts(self._group, own) if text]
        unlike = (
            f"every process must read the same data for job {name!r}, got others on some; "
            f"they must lie where all nodes see them"
        )
        self._stager.drop(name)
        self._waiting.pop(name, None)
        self._refuse(name, reasons[0] if reasons else unlike)

    def _ask_to_join(self, name: str) -> None:
        if name in self._stager:
            self._waiting[name] = None
        elif name not in self.live.names():
            self._refuse(name, f"job {name!r} must be prepared before it joins, got none")

    def _join(self, name: str) -> tuple[str, int]:
        staged = self._stager.take(name)
        step = staged.state.step
        self._rates.begin(name, staged.state.tokens)
        self.live.join(staged)
        return name, step

    def _leave(self, name: str, *, save: bool) -> None:
        if save and name in self.live.names():
            self.live.wait_to_save(name)
            if self._group is not None:
                # Ranks that run ahead would keep their GPUs busy waiting, and another gang may
                # start on them: its start took 5 s beside such a wait on two H200s, else 2.3 s.
                dist.barrier(self._group)
        if self.live.leave(name, save=save):
            return
        if name in self._stager:
            self._forget(name)
            self._tell("left", name, {"step": 0})

    def _forget(self, name: str) -> None:
        """Drops a job that has been ordered."""
        self._stager.drop(name)
        self._waiting.pop(name, None)
        if name in self._preparing:
            self._preparing.remove(name)

    def _stop(self, *, save: bool) -> None:
        if save:
            self.live.save_active()
        self._has_stopped = True

    def _refuse(self, name: str, error: str) -> None:
        self._tell("refused", name, {"error": error})


class _Rates:
    """Tokens a second, over all rounds and of each job, told every few seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._since_s = 0.0
        self._tokens = self._told = 0
        self._before: dict[str, int] = {}

    def begin(self, name: str, tokens: int) -> None:
        """Takes note of a job that joins with so many tokens behind it."""
        self._before[name] = tokens

    def add(self, round_s: float, tokens: int) -> None:
        """Counts a round, behind which so many tokens have been trained since the start."""
        self._since_s += round_s
        self._tokens = tokens

    def take(self, live: LiveLoop) -> dict[str, Any] | None:
        """Returns what to tell, if it is time, and begins anew."""
        if self._since_s < self._every_s:
            return None
        now = {job.name: job.tokens for job in live.super_model.jobs if job.is_active}
        jobs = {
            name: (tokens - self._before.get(name, 0)) / self._since_s
            for name, tokens in now.items()
        }
        rate = (self._tokens - self._told) / self._since_s
        self._since_s, self._told, self._before = 0.0, self._tokens, now
        return {"rounds": live.rounds, "tokens_per_s": rate, "jobs": jobs}
