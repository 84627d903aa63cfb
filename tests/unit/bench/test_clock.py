"""Arithmetic of the benchmarks' clocks, on a CPU."""

from __future__ import annotations

import pytest

from scripts.bench.harness import clock
from scripts.bench.harness.clock import Marks, timed


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Readings of `time.perf_counter` in the module under test: the last entry."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[-1])
    return now


def test_marks_are_the_times_between_them(host_clock: list[float]) -> None:
    marks = Marks(on_gpu=False)
    for now in (1.0, 1.5, 3.5):
        host_clock.append(now)
        marks.set()
    assert marks.seconds() == [0.5, 2.0]


def test_steps_are_timed_together_and_one_by_one(host_clock: list[float]) -> None:
    lengths = iter([100.0, 100.0, 1.0, 2.0, 4.0])

    def step() -> None:
        host_clock.append(host_clock[-1] + next(lengths))

    timing = timed(step, warmup=2, repeats=3)
    assert (timing.seconds, timing.steps) == (7.0, 3)
    assert timing.step_times_s == (1.0, 2.0, 4.0)
    assert timing.percentile_s(50) == 2.0
