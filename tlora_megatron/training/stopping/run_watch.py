"""Watches a loop's rounds: the run may be asked to stop, and must not stand still."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tlora_megatron.training.stopping.agreement import StopAgreement
from tlora_megatron.training.stopping.hang_watch import HangWatch
from tlora_megatron.training.stopping.signals import StopSignals


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
