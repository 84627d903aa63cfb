"""Learning rates against transformers' own schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from tlora_megatron.config.job import ScheduleSpec
from tlora_megatron.training.job_state import learning_rate

HF_NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
fast = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("name", HF_NAMES)
@given(warmup=st.integers(0, 12), num_steps=st.integers(1, 30), peak=st.floats(1e-6, 1.0))
@fast
def test_rates_equal_transformers(name: str, warmup: int, num_steps: int, peak: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = get_scheduler(
        HF_NAMES[name], optimizer, num_warmup_steps=warmup, num_training_steps=num_steps
    )
    spec = ScheduleSpec(name=name, warmup_steps=warmup)
    for step in range(num_steps):
        expected = optimizer.param_groups[0]["lr"]
        actual = learning_rate(spec, peak, step, num_steps)
        assert math.isclose(actual, expected, rel_tol=1e-12, abs_tol=1e-15 * peak), step
        optimizer.step()
        scheduler.step()


def test_a_warm_up_may_be_a_share_of_the_job_s_steps() -> None:
    """Rounded up, as TrainingArguments.get_warmup_steps has it."""
    share, steps = ScheduleSpec(warmup_ratio=0.1), ScheduleSpec(warmup_steps=3)
    rates = [[learning_rate(spec, 0.5, step, 21) for step in range(21)] for spec in (share, steps)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("name", ["linear", "cosine"])
@given(warmup=st.integers(0, 9), length=st.integers(1, 20), floor=st.floats(0.0, 0.5))
@fast
def test_a_decay_falls_from_the_peak_to_its_floor(
    name: str, warmup: int, length: int, floor: float
) -> None:
    spec = ScheduleSpec(name=name, warmup_steps=warmup, min_lr=floor)
    num_steps = warmup + length
    rates = [learning_rate(spec, 0.5, step, num_steps) for step in range(warmup, num_steps + 1)]
    assert rates[0] == 0.5
    assert rates[-1] == pytest.approx(floor)
    assert rates == sorted(rates, reverse=True)
    middle = learning_rate(spec, 0.5, warmup + length // 2, num_steps)
    if length % 2 == 0:
        assert middle == pytest.approx((0.5 + floor) / 2)


def test_a_constant_rate_ignores_the_floor() -> None:
    spec = ScheduleSpec(name="constant", warmup_steps=2, min_lr=0.25)
    assert [learning_rate(spec, 1.0, step, 5) for step in range(5)] == [0.0, 0.5, 1.0, 1.0, 1.0]
