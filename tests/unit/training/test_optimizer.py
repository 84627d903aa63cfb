"""Steps and learning rates of each job against torch's AdamW and transformers' schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from tests.helpers.optimizer_case import (
    SLOTS,
    SPECS,
    TorchJob,
    accumulate,
    make_bank,
    random_gradient,
    request,
    state,
    unmoved,
)
from tlora_megatron.config.job import ScheduleSpec
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.job_state import learning_rate
from tlora_megatron.training.optimizer import step_adapters


def test_steps_equal_torch_job_by_job(groups: ParallelGroups) -> None:
    bank = make_bank()
    jobs = [TorchJob(bank, slot) for slot in SLOTS]
    updates = [0, 0, 0]
    for step in range(8):
        # Not every job steps in every round, nor by the same rate.
        stepping = [slot for slot in SLOTS if (step + slot) % (slot + 1) == 0]
        rates = {slot: SPECS[slot].lr * (1 + step) / 8 for slot in stepping}
        gradients = {slot: random_gradient(bank, slot, step, 0.1 * (1 + step)) for slot in stepping}
        for slot in stepping:
            accumulate(bank, slot, gradients[slot])
        requests = [request(slot, updates[slot], lr=rates[slot]) for slot in stepping]
        outcomes = step_adapters(bank, groups, requests)
        for slot, outcome in zip(stepping, outcomes, strict=True):
            updates[slot] += 1
            norm = jobs[slot].step(gradients[slot], rates[slot])
            assert outcome.applied
            assert outcome.loss == 2.5
            assert outcome.grad_norm == pytest.approx(norm, rel=1e-6)
        for slot in SLOTS:
            master = bank.adapters[slot].slab.master
            torch.testing.assert_close(master, jobs[slot].master, rtol=2e-6, atol=2e-7)
    assert updates == [8, 4, 3]


@pytest.mark.parametrize(
    ("loss", "poison"),
    [(math.nan, None), (math.inf, None), (-math.inf, None), (1.0, math.nan), (1.0, math.inf),
     (1.0, -math.inf)],
)  # fmt: skip
def test_not_finite_moves_nobody(loss: float, poison: float | None, groups: ParallelGroups) -> None:
    bank, alone = make_bank(), make_bank()
    for each in (bank, alone):
        for slot in SLOTS:
            accumulate(each, slot, random_gradient(each, slot, 5))
    before = state(bank, 1)
    if poison is not None:
        flat = torch.zeros(bank.adapters[1].slab.layout.numel)
        flat[-1] = poison
        accumulate(bank, 1, flat)
    bad = request(1, 0, loss=loss)
    outcomes = step_adapters(bank, groups, [request(0, 0), bad, request(2, 0)])
    healthy = step_adapters(alone, groups, [request(0, 0), request(1, 0), request(2, 0)])
    assert [outcome.applied for outcome in outcomes] == [True, False, True]
    assert not (math.isfinite(outcomes[1].loss) and math.isfinite(outcomes[1].grad_norm))
    assert unmoved(before, state(bank, 1))
    for slot in (0, 2):
        assert outcomes[slot] == healthy[slot]
        assert unmoved(state(alone, slot), state(bank, slot))
    assert not bank.adapters[1].slab.grad.any(), "a bad gradient must not reach the next step"


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, math.nan), (torch.bfloat16, -math.inf), (torch.bfloat16, 3.4e38),
     (torch.float16, 7e4)],
)  # fmt: skip
def test_weights_that_overflow_stay_out_of_the_arenas_and_stop_their_job(
    dtype: torch.dtype, value: float, groups: ParallelGroups
) -> None:
    """GEMM tiles that adapters share multiply each one's weights with zeros for the others."""
    bank = make_bank(dtype)
    bank.adapters[1].slab.master[-1] = value
    bank.refresh(1)
    for factors in bank.fused_factors.values():
        assert all(arena.isfinite().all() for arena in (factors.lora_a, *factors.lora_b))
    for slot in SLOTS:
        accumulate(bank, slot, random_gradient(bank, slot, 5))
    outcomes = step_adapters(bank, groups, [request(slot, 0) for slot in SLOTS])
    assert [outcome.applied for outcome in outcomes] == [True, False, True]
    assert math.isnan(outcomes[1].loss)
    master = bank.adapters[1].slab.master[-1]
    assert torch.equal(master, torch.tensor(value)) or master.isnan(), "it is not made up"


def test_an_idle_job_does_not_move_and_keeps_its_gradient(groups: ParallelGroups) -> None:
    bank = make_bank()
    gradients = [random_gradient(bank, slot, 2) for slot in SLOTS]
    for slot in SLOTS:
        accumulate(bank, slot, gradients[slot])
    before = [state(bank, slot) for slot in SLOTS]
    step_adapters(bank, groups, [request(1, 0)])
    assert [unmoved(before[slot], state(bank, slot)) for slot in SLOTS] == [True, False, True]
    assert torch.equal(bank.adapters[0].slab.grad, gradients[0])
    assert torch.equal(bank.adapters[2].slab.grad, gradients[2])
    assert not bank.adapters[1].slab.grad.any()


def test_steps_wait_for_copies(groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save copies beside the rounds; masters and moments must not change under it."""
    bank, waited = make_bank(), list[AdapterSlab]()
    before = [adapter.slab.master.clone() for adapter in bank.adapters]

    def wait(slab: AdapterSlab) -> None:
        place = [adapter.slab for adapter in bank.adapters].index(slab)
        assert torch.equal(slab.master, before[place])
        waited.append(slab)

    monkeypatch.setattr(AdapterSlab, "wait_for_readers", wait)
    accumulate(bank, 1, random_gradient(bank, 1, 0, 1.0))
    step_adapters(bank, groups, [request(1, 0)])
    assert waited == [bank.adapters[1].slab]
    assert not torch.equal(waited[0].master, before[1])


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
def test_decays_fall_from_peak_to_floor(name: str, warmup: int, length: int, floor: float) -> None:
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
