"""The arithmetic of the doors' bench, and that its rows keep one form."""

from __future__ import annotations

import pytest

from scripts.bench.doors.fused import throughput
from scripts.bench.doors.tenants import Step


def test_throughput_counts_while_all_tenants_are_there() -> None:
    steps = [
        Step(0, 0.0, 1.0, 100),  # before the other tenant came
        Step(0, 2.0, 2.0, 100),
        Step(1, 3.0, 2.0, 100),
        Step(0, 6.0, 1.0, 100),
        Step(1, 6.0, 3.0, 100),  # after the first one's end
    ]
    assert throughput(steps) == pytest.approx(300 / (7.0 - 3.0))
