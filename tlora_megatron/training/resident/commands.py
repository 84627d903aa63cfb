"""Commands to a loop: jobs join and leave by them, behind the same round on every rank.

1. Agree: the first rank's commands are sent to the others over gloo while a round computes. All
   ranks carry them out behind it, in the same order. An idle loop waits for commands.
2. Prepare: each rank reads a job on a thread. It is `prepared` when all ranks have read the same,
   or `refused` with a sentence.
3. Join: between two rounds a prepared job gets a slot. Adapters that stay are not copied
   (`layers.arenas`). A job with evaluation data is scored first, a micro-batch between rounds.
4. Train: files in a job's folder are written only while `may_write` says so, which is asked right
   before every line and every rename. A job of which it says no leaves at the next boundary.
5. Leave, with a checkpoint, or end, exported with a summary of its own. A failed job leaves no
   placeholder if its co-trained jobs have portions.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tlora_megatron.training.driven_requests import Clients
from tlora_megatron.training.job_saves import StagedJob
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.metrics import EventSink
from tlora_megatron.training.resident.client_steps import RequestExecutor
from tlora_megatron.training.resident.staging import (
    Agreement,
    Failed,
    Order,
    Readiness,
    Stager,
    gather_texts,
)
from tlora_megatron.training.run.determinism import frozen_gc

Command = Mapping[str, Any]
"""`kind`, and where it has them `job`, `body` and `seq`; all values are of JSON."""

_IDLE_S = 10.0
"""An idle loop looks so often whether it still may do what it does."""
_BUSY_S = 0.02
"""It looks so often while a job is prepared."""
_MORE_S = 0.5
"""It waits so long for a command that is announced: a job that misses the first round waits until
it ends, which takes seconds in a new process."""
_OWNED_S = 0.5
"""A busy loop looks so often whether it still may write its jobs' files, a read for each job.
Nothing is written without a look of its own."""
_REPORT_S = 2.0
"""Between two events of the kind `round`."""
_LOOK_S, _LOOKED_AT = 0.005, 16
"""An idle loop looks so often for requests of so many driven jobs; of more, less often."""


class CommandSource(Protocol):
    """Where commands come in, on the first rank."""

    def take(self) -> Sequence[Command]:
        """Returns the commands that have come since the last call, in order; never waits."""

    def wait(self, seconds: float) -> object:
        """Waits until there is something to take, but no longer than so many seconds."""


class JobCommands:
    """Lets jobs join and leave a loop by commands, which all ranks carry out behind the same round.

    `serve` runs rounds until a command stops it. A run that ends by itself calls `behind_round`.

    Args:
        group: of gloo over the world; in `serve` nothing else uses it. None = a world of one.
        events: takes what becomes of commands; None = the loop's.
        clients: who keeps the requests of driven jobs; None = there are no such jobs.
    """

    def __init__(
        self,
        loop: Loop,
        stager: Stager,
        group: dist.ProcessGroup | None,
        *,
        events: EventSink | None = None,
        clients: Clients | None = None,
    ) -> None:
        self.loop = loop
        self.requests = RequestExecutor(loop, clients or Clients())
        self._stager = stager
        self._group = group
        self._emit = loop.reports.emit if events is None else events.emit
        self._agreement = Agreement(group)
        self._preparing: list[str] = []
        """Jobs that some rank may still be preparing; the same on all ranks."""
        self._waiting: dict[str, None] = {}
        """Jobs that join as soon as they are prepared."""
        self._rates = _Rates()
        self._looked_s = -math.inf
        self._has_stopped = False

    @property
    def is_preparing(self) -> bool:
        """True while a job is on its way."""
        return bool(self._preparing or self._waiting)

    def serve(self, source: CommandSource | None) -> None:
        """Runs until a command stops it, maybe not for the first time; every rank calls it.

        Args:
            source: where commands come in, on the first rank; None on the others.
        """
        self._has_stopped = False
        self.loop.start()
        with frozen_gc():
            while not self._has_stopped:
                try:
                    self._turn(source)
                except torch.OutOfMemoryError:
                    self._emit("out_of_memory", None, {"joining": self.loop.joining})
                    raise

    def behind_round(self, source: CommandSource | None, *, has_commands: bool) -> None:
        """Carries out commands behind a round of the loop's own `run`; collective.

        Args:
            has_commands: some have come; the same on all ranks.
        """
        ready, commands = self._readiness().read(), []
        if has_commands:
            self._agreement.begin([] if source is None else list(source.take()))
            commands = self._agreement.read()
        self._at_boundary({"commands": commands, "lost": (), "save": ()}, ready)

    def close(self) -> None:
        """Ends the thread that prepares jobs; a second call does nothing."""
        self._stager.close()

    def _turn(self, source: CommandSource | None) -> None:
        """A round, if there is one, and what is carried out behind it."""
        is_idle = not (self.loop.has_work or self.requests.has_work)
        word = self._word(source, is_idle=is_idle)
        ready = self._readiness()
        loaded = Readiness(self._group, self.requests.loads())
        self._agreement.begin(word)
        if not is_idle:
            self._work()
        word, found = self._agreement.read(), ready.read()
        self.requests.advance(word["asked"], loaded.read())
        self._at_boundary(word, found)

    def _readiness(self) -> Readiness:
        return Readiness(self._group, {name: self._stager.state(name) for name in self._preparing})

    def _word(self, source: CommandSource | None, *, is_idle: bool) -> dict[str, Any] | None:
        """Returns the first rank's word for the boundary behind the round that begins."""
        if source is None:
            return None
        if is_idle:
            self._rest(source)
        commands = list(source.take())
        while is_idle and commands and (commands[-1].get("body") or {}).get("more"):
            if not source.wait(_MORE_S):
                break
            commands += source.take()
        return {
            "commands": commands,
            "lost": self._lost(),
            "save": self.loop.saves.due_by_time(),
            "asked": self.requests.news(),
        }

    def _lost(self) -> list[str]:
        """Jobs whose files are somebody else's by now, if it is time to look."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _OWNED_S:
            return []
        self._looked_s = now_s
        names = [job.name for job in self.loop.active]
        return [name for name in names if not self.loop.files.may_write(name)]

    def _rest(self, source: CommandSource) -> None:
        """Waits for commands or requests; reports what has been written meanwhile."""
        if not self.requests.jobs:
            self.loop.saves.drain()  # no job waits
            source.wait(_BUSY_S if self._preparing else _IDLE_S)
            return
        self.loop.saver.report()
        is_short = self._preparing or self.requests.is_held_up or self.loop.saver.is_busy
        end_s = time.monotonic() + (_BUSY_S if is_short else _IDLE_S)
        look_s = _LOOK_S * max(1.0, len(self.requests.jobs) / _LOOKED_AT)
        while not self.requests.has_news and not source.wait(look_s):
            self.loop.saver.report()  # a client waits for what has been written
            if time.monotonic() > end_s:
                return

    def _work(self) -> None:
        """A round, and a micro-batch of an evaluation."""
        begin_s = time.perf_counter()
        if self.loop.has_round:
            self.loop.step()
        self.loop.evaluate_part()
        self.requests.forward_part()
        self._rates.add(time.perf_counter() - begin_s, self.loop.tokens)
        if (found := self._rates.take(self.loop)) is not None:
            self._emit("round", None, found)

    def _at_boundary(self, word: Mapping[str, Any], ready: Mapping[str, bool]) -> None:
        """Carries out what the ranks have agreed on, in the same order on all of them."""
        begin_s, joined = time.perf_counter(), []
        for name in word["lost"]:
            self.loop.leave(name, save=False, lost=True)
        self.loop.saves.save_moved(word["save"])
        for name, is_ready in ready.items():
            self._note_prepared(name, is_ready)
        for command in word["commands"]:
            self._carry_out(command)
        for name in [name for name in self._waiting if name not in self._preparing]:
            del self._waiting[name]
            staged = self._stager.take(name)
            joined.append((name, staged.state.step))
            self._rates.begin(name, staged.state.tokens)
            self.loop.join(staged)
        if joined:
            gc.freeze()
            stall_s = time.perf_counter() - begin_s
            for name, step in joined:
                facts = {"round": self.loop.rounds, "from_step": step, "stall_s": stall_s}
                self._emit("joined", name, facts)
        for command in word["commands"]:
            if "seq" in command:
                self._emit("applied", command.get("job"), {"seq": command["seq"]})
        if self._has_stopped:
            self.loop.saves.drain()
            self.requests.flush()
            self._emit("stopped", None, {})

    def _carry_out(self, command: Command) -> None:
        kind, name, body = command["kind"], str(command.get("job")), command.get("body") or {}
        save = bool(body.get("save", True))
        if kind == "prepare":
            self._prepare(name, body)
        elif kind == "join" and name in self._stager:
            self._waiting[name] = None
        elif kind == "join" and self._training(name) is None:
            self._refuse(name, f"job {name!r} must be prepared before it joins, got none")
        elif kind == "leave":
            self._leave(name, save=save)
        elif kind == "save" or (kind == "stop" and save):
            self.loop.save_active()
        elif kind not in ("join", "renew", "stop"):
            message = f"command {kind!r} is not known here"
            self._emit("note", command.get("job"), {"message": message})
        self._has_stopped |= kind == "stop"

    def _prepare(self, name: str, order: Order) -> None:
        if self._training(name) is not None:
            self._refuse(name, f"job {name!r} trains here already")
        elif name not in self._stager:  # the same order twice is one
            self._stager.order(name, {**order, "job": name})
            self._preparing.append(name)

    def _training(self, name: str) -> JobState | None:
        return next((job for job in self.loop.active if job.name == name), None)

    def _note_prepared(self, name: str, is_ready: bool) -> None:
        """Takes note of what all ranks have found; a job that some rank refuses is gone."""
        if name not in self._stager or name not in self._preparing:
            return
        self._preparing.remove(name)
        found = self._stager.found(name)
        if is_ready and isinstance(found, StagedJob):
            facts = {"num_steps": found.state.plan.num_steps, "from_step": found.state.step}
            self._emit("prepared", name, {"digest": found.digest, **facts})
            return
        own = found.error if isinstance(found, Failed) else ""
        reasons = [text for text in gather_texts(self._group, own) if text]
        unlike = (
            f"every process must read the same data for job {name!r}, got others on some; "
            f"they must lie where all nodes see them"
        )
        self._forget(name)
        self._refuse(name, reasons[0] if reasons else unlike)

    def _leave(self, name: str, *, save: bool) -> None:
        job = self._training(name)
        if save and job is not None:
            self.loop.saver.wait_for_room(job)
            if self._group is not None:
                # Ranks that run ahead would keep their GPUs busy waiting, and another gang may
                # start on them: its start took 5 s beside such a wait on two H200s, else 2.3 s.
                dist.barrier(self._group)
        if not self.loop.leave(name, save=save) and name in self._stager:
            self._forget(name)
            self._emit("left", name, {"step": 0})

    def _forget(self, name: str) -> None:
        """Drops a job that has been ordered."""
        self._stager.drop(name)
        self._waiting.pop(name, None)
        if name in self._preparing:
            self._preparing.remove(name)

    def _refuse(self, name: str, error: str) -> None:
        self._emit("refused", name, {"error": error})


class _Rates:
    """Tokens a second, over all rounds and of each job, reported every few seconds."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._tokens = self._reported = 0
        self._before: dict[str, int] = {}

    def begin(self, name: str, tokens: int) -> None:
        """Takes note of a job that joins with so many tokens behind it."""
        self._before[name] = tokens

    def add(self, round_s: float, tokens: int) -> None:
        """Counts a round, behind which so many tokens have been trained since the start."""
        self._since_s += round_s
        self._tokens = tokens

    def take(self, loop: Loop) -> dict[str, Any] | None:
        """Returns what to report, if it is time, and begins anew."""
        if self._since_s < _REPORT_S:
            return None
        now = {job.name: job.tokens for job in loop.active}
        jobs = {
            name: (tokens - self._before.get(name, 0)) / self._since_s
            for name, tokens in now.items()
        }
        rate = (self._tokens - self._reported) / self._since_s
        self._since_s, self._reported, self._before = 0.0, self._tokens, now
        return {"rounds": loop.rounds, "tokens_per_s": rate, "jobs": jobs}
