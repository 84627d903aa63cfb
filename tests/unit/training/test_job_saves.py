"""When jobs are saved by steps and by time."""

from __future__ import annotations

import math

import pytest

from tlora_megatron.training.job_saves import SavePolicy


@pytest.mark.parametrize(
    ("every_s", "has_checkpoint", "due_s"),
    [(60.0, False, 3.0), (60.0, True, 60.0), (1.0, False, 1.0), (0.0, False, math.inf)],
)
def test_a_job_without_a_checkpoint_is_due_within_seconds(
    every_s: float, has_checkpoint: bool, due_s: float
) -> None:
    saves = SavePolicy(0, every_s, has_checkpoint, saved_s=100.0)
    for now_s in (100.0, 102.0, 104.0, 159.0, 161.0):
        assert (saves.late_s(now_s) >= 0) == (now_s - 100.0 >= due_s)


def test_steps_and_time_ask_for_saves_on_their_own() -> None:
    assert [step for step in range(1, 9) if SavePolicy(3).is_due(step)] == [3, 6]
    assert not any(SavePolicy(0, 1.0).is_due(step) for step in range(1, 9))
