"""Times operations on a device that is kept busy, so that its clock is as in training."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

_CYCLES_PER_S = 2.1e9
"""Upper bound on any GPU's clock, so that a wait of this many cycles is long enough."""
_MOST_AHEAD_S = 0.5


class DeviceTimer:
    """Times calls that run in turn, back to back; on a CPU by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def medians(
        self,
        calls: Sequence[Callable[[], object]],
        *,
        seconds: float,
        most: int = 20,
        ahead: bool = False,
    ) -> list[float]:
        """Median seconds of each call over turns in which each runs once.

        Waits for the device, before and after.

        Args:
            seconds: about how long to measure; three turns at least.
            most: turns.
            ahead: the device waits until the host has queued everything: for calls that take the
                host longer than the device.
        """
        self._turn(calls)
        self.synchronize()
        begin = time.perf_counter()
        marks = self._turn(calls)
        host_s = time.perf_counter() - begin
        self.synchronize()
        turn_s = sum(_gaps(marks))
        turns = max(3, min(most, int(seconds / max(turn_s, host_s if ahead else 0.0, 1e-9))))
        if ahead and self.device.type == "cuda":
            wait_s = min(1.3 * host_s * turns, _MOST_AHEAD_S)
            torch.cuda._sleep(int(wait_s * _CYCLES_PER_S))
        rounds = [self._turn(calls) for _ in range(turns)]
        self.synchronize()
        return [statistics.median(times) for times in zip(*map(_gaps, rounds), strict=True)]

    def sustained_s(self, call: Callable[[], object], turns: int) -> float:
        """Mean seconds of a call that is repeated `turns` times without waiting in between.

        The number is fixed and not the time, because a call with collectives must be made equally
        often on every process.
        """
        call()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(turns):
            call()
        self.synchronize()
        return (time.perf_counter() - begin) / turns

    def host_s(self, call: Callable[[], object], turns: int = 5) -> float:
        """Median seconds from a call to the end of its work on the device, each alone."""
        times = []
        for _ in range(turns + 1):
            self.synchronize()
            begin = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _turn(self, calls: Sequence[Callable[[], object]]) -> list[_Mark]:
        marks = [_Mark(self.device)]
        for call in calls:
            call()
            marks.append(_Mark(self.device))
        return marks


class _Mark:
    """A moment in the device's queue."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time_s = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._time_s = time.perf_counter()

    def until(self, later: _Mark) -> float:
        """Seconds between two moments that have passed."""
        if self._event is not None and later._event is not None:
            return self._event.elapsed_time(later._event) / 1e3
        return later._time_s - self._time_s


def _gaps(marks: Sequence[_Mark]) -> list[float]:
    return [begin.until(end) for begin, end in itertools.pairwise(marks)]
