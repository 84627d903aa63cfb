"""Says where a process's time goes: every moment belongs to one phase, so that they add up.

    with timeline.phase("saving"):
        ...

A phase inside another one takes its time away from it. Only the main thread's time is counted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PHASES = (
    "imports",
    "kernels",
    "base",
    "data",
    "rounds",
    "evaluation",
    "saving",
    "export",
    "rest",
)
"""What a run's time is spent on, in the order in which it is shown."""

BEGIN_VARIABLE = "TLORA_BEGIN_S"
"""The environment variable in which a launcher tells its ranks when the user's command began, in
seconds of `boot_clock_s`."""


class Timeline:
    """The seconds of a process by phase, from `begin_s` on.

    Args:
        begin_s: when the first phase began, on this host's boot clock.
        first: what the time until the first `settle` belongs to.
    """

    def __init__(self, begin_s: float, first: str = "imports") -> None:
        self.begin_s = begin_s
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._open = [first]
        self._since_s = begin_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what runs inside towards `name`; on other threads it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def settle(self, name: str = "rest") -> None:
        """Counts what follows outside all phases towards `name`."""
        self._switch()
        self._open[0] = name

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase until now; their sum is the time since `begin_s`."""
        self._switch()
        return dict(self._seconds)

    def _switch(self) -> None:
        now_s = boot_clock_s()
        self._seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


def boot_clock_s() -> float:
    """Seconds since this host started, the same clock in all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_begin_s() -> float:
    """Returns when the user's command began: a launcher's word, else the start of this process."""
    told = os.environ.get(BEGIN_VARIABLE)
    if told is not None:
        return float(told)
    try:
        # The name in brackets may hold spaces; the start is the 22nd field, the 20th behind it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return boot_clock_s()


_process = Timeline(process_begin_s())


def process_timeline() -> Timeline:
    """Returns the timeline of this process's run."""
    return _process


def restart(first: str = "rest") -> None:
    """Begins a new timeline, for a further run in the same process."""
    global _process
    _process = Timeline(boot_clock_s(), first)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """`Timeline.phase` of this process's run."""
    with _process.phase(name):
        yield
