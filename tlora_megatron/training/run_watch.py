"""Watches a loop's rounds: ranks agree where to stop, and a run must not stand still."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tlora_megatron.training.signals import StopSignals

logger = logging.getLogger(__name__)

_FIRST_S = 600.0
_FIRST_ROUNDS = 3
"""Kernels are compiled in the first rounds, on a machine that has none for minutes."""
_CONTINUES = "the same command continues every job from its last checkpoint"
_SPEAKER_S = 2.0
_LOOK_S = 2.0
_watches = 0
"""Runs that this process has watched, the same number on all ranks."""
T = TypeVar("T")


class Beat(NamedTuple):
    """A rank's last sign of life, in the store as a list in JSON."""

    number: int
    still_s: float
    """Seconds since its main thread last got on; below 0 while it is outside of the loop."""
    host: str
    place: str


class HangWatch:
    """A thread that ends the process when no rank has got on for `limit_s`.

    The loop calls `tick` whenever it gets on. Each rank's thread writes a beat to the run's store
    every few seconds, also while its main thread waits in NCCL. A rank that has not got on for the
    limit reads the others' beats: those that have stopped beating do not answer, being stopped,
    dead or unreachable. While another rank gets on, or is outside of the loop, it waits.

    Args:
        store: of this run alone; None = nothing is watched.
        signals: once one has come, a rank that does not answer ends the process at once: torchrun
            sends it also when another rank has died, and no round can end without that one.
        end: is told why the run has ended; None = ends the process with exit code 1.
    """

    def __init__(
        self,
        limit_s: float,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        *,
        signals: StopSignals | None = None,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._limit_s = limit_s
        self._signals = signals
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._end = end or self._end_process
        self._ticks = self._rounds = self._depth = 0
        self._place = "the start"
        self._host = self._keeper = socket.gethostname()
        self._period_s = min(5.0, limit_s / 20)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._publish(Beat(0, -1.0, self._host, self._place))
            self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
            self._thread.start()

    @classmethod
    def of_world(cls, limit_s: float, signals: StopSignals | None = None) -> HangWatch:
        """Watches the ranks of the process group; every one of them makes its own."""
        global _watches
        _watches += 1
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store: dist.Store | None = None
        if limit_s > 0 and world_size > 1:
            # A connection of its own: the main thread may wait for an answer on the other one.
            own = _get_default_store().clone()  # type: ignore[attr-defined]
            store = dist.PrefixStore(f"tlora/beat/{_watches}", own)
        return cls(limit_s, store, rank, world_size, signals=signals)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what runs inside; a loop may be watched as a whole and round by round."""
        self.tick(self._place)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def tick(self, place: str) -> None:
        """Notes that the loop gets on, and what it does next."""
        self._place = place
        self._ticks += 1

    def end_round(self) -> None:
        self._rounds += 1
        self.tick("what follows a round")

    def close(self) -> None:
        """Ends the thread; a second call does nothing."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_SPEAKER_S)

    @property
    def _patience_s(self) -> float:
        limit_s = self._limit_s
        return limit_s if self._rounds >= _FIRST_ROUNDS else max(limit_s, _FIRST_S)

    @property
    def _look_s(self) -> float:
        """Between two looks at the others: a rank that lives has beaten, however busy its host."""
        return max(_LOOK_S, 3 * self._period_s)

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the host of the store is that of rank 0
            if self._store is not None:
                self._keeper = Beat(*json.loads(self._store.get("0"))).host
        count, still_s, ticks, last_s = 0, 0.0, -1, time.monotonic()
        before: Sequence[Beat] | None = None
        before_s = 0.0
        while not self._closed.wait(self._period_s):
            now_s = time.monotonic()
            # A process that was itself stopped has not watched in the meantime.
            still_s += min(now_s - last_s, 2 * self._period_s)
            last_s = now_s
            if self._ticks != ticks or not self._depth:
                ticks, still_s, before = self._ticks, 0.0, None
            count += 1
            self._publish(Beat(count, still_s if self._depth else -1.0, self._host, self._place))
            hurries = self._signals is not None and self._signals.received != 0
            if still_s < self._patience_s - self._look_s and not hurries:
                continue
            if before is None:
                before, before_s = self._look(), now_s
            elif now_s - before_s >= self._look_s:
                sentence = self._judge(before, self._look())
                if sentence:
                    return self._end(self._describe(sentence, still_s))
                before, still_s = None, still_s if hurries else 0.0

    def _judge(self, before: Sequence[Beat], after: Sequence[Beat]) -> str:
        """Says what hinders the run, from two looks at all ranks' beats; empty if one gets on."""
        if not before or not after:
            keeper = (
                "torchrun's agent"
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                else "rank 0"
            )
            return f"{keeper} on host {self._keeper}, which keeps the run's store, does not answer"
        silent = [
            rank
            for rank, (earlier, later) in enumerate(zip(before, after, strict=True))
            if earlier.number == later.number and rank != self._rank
        ]
        if silent:
            named = ", ".join(f"rank {rank} on host {after[rank].host}" for rank in silent)
            return f"{named} {'does' if len(silent) == 1 else 'do'} not answer"
        if any(beat.still_s < self._patience_s / 2 for beat in after):
            return ""
        places: dict[str, list[int]] = {}
        for rank, beat in enumerate(after):
            places.setdefault(beat.place, []).append(rank)
        named = "; ".join(f"ranks {numbers} in {place}" for place, numbers in places.items())
        return f"every rank answers, but none gets on: {named}"

    def _describe(self, sentence: str, still_s: float) -> str:
        if still_s < self._patience_s - self._look_s:
            return f"the run cannot stop behind its round, in {self._place}: {sentence}"
        limit = f"{self._patience_s:g} s (run.hang_timeout_s)"
        return f"the run has stood still for {limit}, in {self._place}: {sentence}"

    def _publish(self, beat: Beat) -> None:
        if self._store is None:
            return
        try:
            self._store.set(str(self._rank), json.dumps(beat))
        except RuntimeError:
            # It has gone with its process; torch would log a trace at every further try.
            self._store = None

    def _look(self) -> Sequence[Beat]:
        """Every rank's beat; none if the store does not answer."""
        store, keys = self._store, [str(rank) for rank in range(self._world_size)]
        if store is None:
            return ()
        texts = _within(self._look_s, lambda: store.multi_get(keys))
        if texts is None:
            # The question still waits and holds the connection: a beat would wait behind it.
            self._store = None
            return ()
        return [Beat(*json.loads(text)) for text in texts]

    def _end_process(self, sentence: str) -> NoReturn:
        # Of ranks that find the same one speaks; an agent ends the others as soon as one ends.
        store = self._store
        turn = None if store is None else _within(self._look_s, lambda: store.add("told", 1))
        if turn in (None, 1):
            logger.error("%s; %s", sentence, _CONTINUES)
        else:
            time.sleep(_SPEAKER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """The answer of a store; None if it gives none in time. A stopped store never answers."""
    answers: list[T] = []

    def work() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


class RunWatch:
    """Watches a run for hangs, and asks every rank in every round whether it was signalled.

    Signals reach ranks at different times, but all must stop behind the same round. Each round
    begins one asynchronous all-reduce of two ints over gloo and reads it at its end, when it is
    long done: no GPU and no rank waits for it. A world of one needs no answer.

    Use `open`, which is collective; one that is made without it does nothing.
    """

    def __init__(
        self,
        signals: StopSignals | None = None,
        hangs: HangWatch | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.signals = signals
        """None = no signal stops the run, and no requests are taken; so on all ranks or on none."""
        self._hangs = hangs or HangWatch(0.0, None, 0, 1)
        self.group = group
        """Free for others between `end_round` and `begin_round`; None = a world of one."""
        self.commands_wait: Callable[[], bool] = lambda: False
        """Asked on every rank; some rank's yes becomes all ranks' `has_commands`."""
        self.has_commands = False
        """True if commands waited on some rank when the last round began; the same on all ranks."""
        self._words = torch.zeros(2, dtype=torch.int32, device="cpu")
        self._work: dist.Work | None = None

    @classmethod
    def open(cls, signals: StopSignals | None, hang_timeout_s: float) -> RunWatch:
        """Makes the group and the watch for hangs; every rank of the run must call it.

        Args:
            signals: of this process; None = no signal stops the run.
        """
        is_asked = signals is not None and dist.get_world_size() > 1
        group = dist.new_group(backend="gloo") if is_asked else None
        return cls(signals, HangWatch.of_world(hang_timeout_s, signals), group)

    def watching(self) -> AbstractContextManager[None]:
        return self._hangs.watching()

    def tick(self, place: str) -> None:
        self._hangs.tick(place)

    def begin_round(self, number: int) -> None:
        """Notes that a round begins, and gives the other ranks this one's signal; does not wait.

        From the first round on a signal waits for a round's end.
        """
        self.tick(f"round {number}")
        if self.signals is not None:
            self.signals.hold()
            if self.group is not None:
                self._words[0], self._words[1] = self.signals.received, int(self.commands_wait())
                maximum = dist.ReduceOp.MAX
                self._work = dist.all_reduce(self._words, maximum, self.group, async_op=True)

    def end_round(self) -> int:
        """Number of the signal by which all ranks stop behind this round; 0 = they go on.

        The same on all ranks: one that some rank had got when the round began. A world of one
        counts signals until now.
        """
        number = 0
        if self.group is not None:
            assert self._work is not None, "begin_round comes before end_round"
            self._work.wait()
            self._work = None
            number, has_commands = map(int, self._words.tolist())
            self.has_commands = bool(has_commands)
        elif self.signals is not None:
            self.has_commands, number = self.commands_wait(), self.signals.received
        self._hangs.end_round()
        return number

    def stop(self, number: int) -> None:
        """Notes that the run ends here by a signal; saving may then take as long as it takes."""
        if self.signals is not None:
            self.signals.stopped_by = number
        self._hangs.close()

    def waits_for_room(self) -> bool:
        """Notes a wait for room on the disk; False once a signal asks the run to stop."""
        self.tick("a wait for room on the disk")
        return self.signals is None or not self.signals.received

    def wait_for_all(self) -> None:
        """Waits until every rank has come here: an agent ends all ranks when the first leaves."""
        if self.group is not None:
            dist.barrier(self.group)

    def close(self) -> None:
        """Gives the group up and ends the watch for hangs; a second call does nothing."""
        if self.group is not None and self._work is None:
            dist.destroy_process_group(self.group)
            self.group = None
        self._hangs.close()
