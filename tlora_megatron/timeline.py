"""Says where a process's time goes: every moment belongs to one phase, so that they add up.

    with timeline.phase("saving"):
        ...

A phase inside another one takes its time away from it. Only the main thread's time is counted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
"""The parts of a run's time, in the order in which they are shown."""

BEGIN_VARIABLE = "TLORA_BEGIN_S"
"""The environment variable in which a launcher tells its ranks when the user's command began, in
seconds of `boot_clock_s`."""


class Timeline:
    """The seconds of a process by phase, from `begin_s`; those until `settle` belong to `first`."""

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
    """Returns when the user's command began: a launcher's word, else the start of this process.

    torchrun says nothing to its ranks; its own start counts, unless it may have restarted them.
    """
    told = os.environ.get(BEGIN_VARIABLE)
    if told is not None:
        return float(told)
    is_first_life = os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0"
    return _begin_s("self" if not is_first_life else str(os.getppid()))


def _begin_s(process: str) -> float:
    """When a process of `/proc` began; now, where there is no such file."""
    try:
        # The name in brackets may hold spaces; the start is the 22nd field, the 20th behind it.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return boot_clock_s()


_process = Timeline(process_begin_s())
_has_begun_run = False


def process_timeline() -> Timeline:
    """Returns the timeline of this process's run."""
    return _process


def begin_run() -> None:
    """Says that a run begins here, with a timeline of its own; imports came before it."""
    global _process, _has_begun_run
    if _has_begun_run or hasattr(sys, "ps1"):
        _process = Timeline(boot_clock_s(), "rest")
    _has_begun_run = True
    _process.settle()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """`Timeline.phase` of this process's run."""
    with _process.phase(name):
        yield


def time_line(run: Mapping[str, Any]) -> str:
    """Returns the times in `run` of a summary as one line of text, empty if it has none."""
    times = run.get("time_s")
    if not times:
        return ""
    total_s = sum(times.values())
    form = "{:,.0f}" if total_s >= 100 else "{:.1f}"
    parts = ", ".join(f"{name} {form.format(seconds)}" for name, seconds in times.items())
    saving = run.get("saving") or {"writer_s": 0.0, "drain_s": 0.0}
    # The writing thread's time but for that in which the main thread waited for its end.
    beside_s = form.format(max(0.0, saving["writer_s"] - saving["drain_s"]))
    beside = f"; {beside_s} s of saving ran beside the rounds" if beside_s.strip("0.") else ""
    return f"{form.format(total_s)} s = {parts}{beside}"
