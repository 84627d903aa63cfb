"""Steps and learning rates of each job against torch's AdamW and transformers' schedulers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from tests.helpers.linear_case import SPEC
from tlora_megatron.config.job import LoraSpec, OptimizerSpec, ScheduleSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.job_state import learning_rate
from tlora_megatron.training.optimizer import StepRequest, step_adapters

CPU = torch.device("cpu")
LORAS = (
    LoraSpec(rank=4, target_modules=("q_proj", "v_proj")),
    LoraSpec(rank=9, target_modules=("gate_proj", "up_proj", "down_proj")),
    LoraSpec(rank=1, target_modules=("linear_qkv", "o_proj")),
)
SPECS = (
    OptimizerSpec(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1),
    OptimizerSpec(lr=3e-3, max_grad_norm=0.0, betas=(0.8, 0.95), eps=1e-4),
    OptimizerSpec(lr=1e-1, max_grad_norm=1e3, weight_decay=0.01),
)
SLOTS = range(len(LORAS))


def make_bank(dtype: torch.dtype = torch.float32) -> AdapterBank:
    sites = stage_sites(SPEC, ParallelLayout(), tp_rank=0, pp_rank=0)
    bank = AdapterBank(sites, LORAS, dtype=dtype, device=CPU)
    adapters = []
    for slot, lora in enumerate(LORAS):
        slab = bank.new_slab(lora)
        slab.master.normal_(generator=torch.Generator().manual_seed(slot))
        adapters.append(Adapter(name=f"job{slot}", lora=lora, slab=slab))
    bank.install(adapters)
    return bank


def random_gradient(bank: AdapterBank, slot: int, seed: int, std: float = 1.0) -> torch.Tensor:
    numel = bank.adapters[slot].slab.layout.numel
    generator = torch.Generator().manual_seed(100 * seed + slot)
    return torch.randn(numel, generator=generator) * std


def accumulate(bank: AdapterBank, slot: int, flat: torch.Tensor) -> None:
    """Adds a gradient where backward does: through the views that the sites hold."""
    layout = bank.adapters[slot].slab.layout
    used = {target for lora in LORAS for target in lora.target_modules}
    places = {
        shard.name: (bank.fused_factors[site.index], p)
        for site in bank.sites
        for p, shard in enumerate(t for t in site.targets if t.target in used)
    }
    for factor, part in zip(layout.factors, layout.views(flat), strict=True):
        factors, p = places[factor.shard.name]
        grad = (factors.grad_a if factor.which == "lora_a" else factors.grad_b)[slot][p]
        assert grad is not None
        grad.add_(part)


def request(slot: int, updates: int, *, lr: float | None = None, loss: float = 2.5) -> StepRequest:
    spec = SPECS[slot]
    return StepRequest(slot, spec, spec.lr if lr is None else lr, updates, torch.tensor(loss))


class TorchJob:
    """Torch's own way with one job: a parameter a factor, `clip_grad_norm_`, AdamW."""

    def __init__(self, bank: AdapterBank, slot: int) -> None:
        self.layout = bank.adapters[slot].slab.layout
        self.spec = SPECS[slot]
        whole = bank.adapters[slot].slab.master.clone()
        self.params = [torch.nn.Parameter(view.clone()) for view in self.layout.views(whole)]
        spec = self.spec
        self.optimizer = torch.optim.AdamW(
            self.params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
        )

    def step(self, flat: torch.Tensor, lr: float) -> float:
        for param, grad in zip(self.params, self.layout.views(flat.clone()), strict=True):
            param.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(self.params, self.spec.max_grad_norm or math.inf)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return float(norm)

    @property
    def master(self) -> torch.Tensor:
        return torch.cat([param.detach().flatten() for param in self.params])


def state(bank: AdapterBank, slot: int) -> list[torch.Tensor]:
    """Copies of all buffers of a job, and of its compute weights."""
    compute = [view.clone() for view in bank._copies[slot]]
    return [buffer.clone() for buffer in bank.adapters[slot].slab.buffers().values()] + compute


def unmoved(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


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
