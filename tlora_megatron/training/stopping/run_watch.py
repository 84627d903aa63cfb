"""Watches a loop's rounds: ranks agree where to stop, and a run must not stand still."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from tlora_megatron.training.stopping.hang_watch import HangWatch
from tlora_megatron.training.stopping.signals import StopSignals


class StopAgreement:
    """Asks every rank in every round whether it was signalled.

    Signals reach ranks at different times, but all must stop behind the same round. Each round
    begins one asynchronous all-reduce of two ints over gloo and reads it at its end, when it is
    long done: no GPU and no rank waits for it. A world of one needs no answer.

    Args:
        signals: of this process; given on all ranks or on none.
    """

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self.group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        """Free for others between `end_round` and `begin_round`; None = a world of one."""
        self.commands_wait: Callable[[], bool] = lambda: False
        """Asked on every rank; some rank's yes becomes all ranks' `has_commands`."""
        self.has_commands = False
        """True if commands waited on some rank when the last round began; the same on all ranks."""
        self._words = torch.zeros(2, dtype=torch.int32, device="cpu")
        self._work: dist.Work | None = None

    def begin_round(self) -> None:
        """Gives the other ranks this one's signal; collective, but does not wait."""
        self._signals.hold()
        if self.group is not None:
            self._words[0], self._words[1] = self._signals.received, int(self.commands_wait())
            self._work = dist.all_reduce(self._words, dist.ReduceOp.MAX, self.group, async_op=True)

    def end_round(self) -> int:
        """Number of the signal that some rank had got when the round began; 0 = none has.

        The same on all ranks. A world of one counts signals until now.
        """
        if self.group is None:
            self.has_commands = self.commands_wait()
            return self._signals.received
        assert self._work is not None, "begin_round comes before end_round"
        self._work.wait()
        self._work = None
        number, has_commands = self._words.tolist()
        self.has_commands = bool(has_commands)
        return int(number)

    def wait_for_all(self) -> None:
        """Waits until every rank is here: an agent ends all ranks when the first one leaves."""
        if self.group is not None:
            dist.barrier(self.group)

    def close(self) -> None:
        """Gives the group up; a second call does nothing.

        Behind a failed round it stays: others may never answer, and its end waits for them.
        """
        if self.group is not None and self._work is None:
            dist.destroy_process_group(self.group)
            self.group = None


class RunWatch:
    """The agreement to stop and the watch for hangs of one run; without either it does nothing.

    Use `open`, which is collective.
    """

    def __init__(
        self,
        signals: StopSignals | None = None,
        agreement: StopAgreement | None = None,
        hangs: HangWatch | None = None,
    ) -> None:
        self._signals = signals
        self.agreement = agreement
        """None = no signal stops the run, and no requests are taken."""
        self._hangs = hangs

    @classmethod
    def open(cls, signals: StopSignals | None, hang_timeout_s: float) -> RunWatch:
        """Makes both; every rank of the run must call it.

        Args:
            signals: of this process; None = no signal stops the run.
            hang_timeout_s: see `RunSpec.hang_timeout_s`.
        """
        agreement = None if signals is None else StopAgreement(signals)
        return cls(signals, agreement, HangWatch.of_world(hang_timeout_s, signals))

    def watching(self) -> AbstractContextManager[None]:
        """Watches for hangs inside."""
        return nullcontext() if self._hangs is None else self._hangs.watching()

    def tick(self, place: str) -> None:
        """Notes that this rank gets on, and what it does next."""
        if self._hangs is not None:
            self._hangs.tick(place)

    def begin_round(self, number: int) -> None:
        """Notes that a round begins; from the first on a signal waits for a round's end."""
        self.tick(f"round {number}")
        if self.agreement is not None:
            self.agreement.begin_round()

    def end_round(self) -> int:
        """Number of the signal by which all ranks stop behind this round; 0 = they go on."""
        number = 0 if self.agreement is None else self.agreement.end_round()
        if self._hangs is not None:
            self._hangs.end_round()
        return number

    def stop(self, number: int) -> None:
        """Notes that the run ends here by a signal; saving may then take as long as it takes."""
        if self._signals is not None:
            self._signals.stopped_by = number
        if self._hangs is not None:
            self._hangs.close()

    def wait_for_all(self) -> None:
        """Waits until every rank has stopped and come here."""
        if self.agreement is not None:
            self.agreement.wait_for_all()

    def close(self) -> None:
        """Releases both; a second call does nothing."""
        for part in (self.agreement, self._hangs):
            if part is not None:
                part.close()
