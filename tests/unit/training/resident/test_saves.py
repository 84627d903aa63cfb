"""When jobs of a resident loop are saved by time."""

from __future__ import annotations

import math

import pytest

from tlora_megatron.training.resident.live_loop import _Saves


@pytest.mark.parametrize(
    ("every_s", "has_checkpoint", "due_s"),
    [(60.0, False, 3.0), (60.0, True, 60.0), (1.0, False, 1.0), (0.0, False, math.inf)],
)
def test_a_job_without_a_checkpoint_is_due_within_seconds(
    every_s: float, has_checkpoint: bool, due_s: float
) -> None:
    saves = _Saves(every_s, 0, has_checkpoint, saved_s=100.0)
    for now_s in (100.0, 102.0, 104.0, 159.0, 161.0):
        assert (saves.late_s(now_s) >= 0) == (now_s - 100.0 >= due_s)
