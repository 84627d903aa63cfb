"""The per-job optimizer against torch's AdamW and `clip_grad_norm_`, a job at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.helpers.linear_case import SPEC
from tlora_megatron.job import LoraSpec, OptimizerSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.plan import ParallelLayout
from tlora_megatron.training.optimizer import StepOutcome, StepRequest, step_adapters

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


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield ParallelGroups(
        layout=ParallelLayout(),
        tp_rank=0,
        pp_rank=0,
        cp_rank=0,
        dp_rank=0,
        tp_group=world,
        dp_cp_group=world,
        model_group=world,
        device=CPU,
    )
    dist.destroy_process_group()


def make_bank(dtype: torch.dtype = torch.float32) -> AdapterBank:
    """Three adapters with random weights."""
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
    """A gradient in the slab's layout."""
    numel = bank.adapters[slot].slab.layout.numel
    generator = torch.Generator().manual_seed(100 * seed + slot)
    return torch.randn(numel, generator=generator) * std


def accumulate(bank: AdapterBank, slot: int, flat: torch.Tensor) -> None:
    """Adds a gradient where backward does: through the views that the sites hold."""
    layout = bank.adapters[slot].slab.layout
    used = {target for lora in LORAS for target in lora.target_modules}
    places = {
        shard.name: (bank.factors[site.index], p)
        for site in bank.sites
        for p, shard in enumerate(t for t in site.targets if t.target in used)
    }
    for factor, part in zip(layout.factors, layout.views(flat), strict=True):
        factors, p = places[factor.shard.name]
        grad = (factors.grad_a if factor.which == "lora_a" else factors.grad_b)[slot][p]
        assert grad is not None
        grad.add_(part)


def request(slot: int, updates: int, *, lr: float | None = None, loss: float = 2.5) -> StepRequest:
    """A step of a job with its settings."""
    spec = SPECS[slot]
    return StepRequest(slot, spec, spec.lr if lr is None else lr, updates, torch.tensor(loss))


class TorchJob:
    """What torch does with one job: a parameter a factor, `clip_grad_norm_`, AdamW."""

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
        """Takes a step; returns the norm before clipping."""
        for param, grad in zip(self.params, self.layout.views(flat.clone()), strict=True):
            param.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(self.params, self.spec.max_grad_norm or math.inf)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return float(norm)

    @property
    def master(self) -> torch.Tensor:
        """All factors in the slab's layout."""
        return torch.cat([param.detach().flatten() for param in self.params])


def state(bank: AdapterBank, slot: int) -> list[torch.Tensor]:
    """Copies of all buffers of a job, and of its compute weights."""
    compute = [view.clone() for view in bank._copies[slot]]
    return [buffer.clone() for buffer in bank.adapters[slot].slab.buffers().values()] + compute


def unmoved(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Whether every buffer holds the same bits."""
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


def test_the_cases_clip_and_do_not(groups: ParallelGroups) -> None:
    bank = make_bank()
    norms = [float(random_gradient(bank, slot, 0, 0.1).norm()) for slot in SLOTS]
    assert norms[0] > SPECS[0].max_grad_norm > 0
    assert norms[2] < SPECS[2].max_grad_norm


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3, 1.0, 1e6])
def test_a_clipped_gradient_has_the_limit_s_norm(
    max_grad_norm: float, groups: ParallelGroups
) -> None:
    """The first moment after one step is `(1 - beta1)` times the gradient that was used."""
    bank = make_bank()
    flat = random_gradient(bank, 0, 1)
    accumulate(bank, 0, flat)
    spec = replace(SPECS[0], max_grad_norm=max_grad_norm)
    step_adapters(bank, groups, [request(0, 0)._replace(spec=spec)])
    used = bank.adapters[0].slab.exp_avg / (1 - spec.betas[0])
    limit = min(max_grad_norm or math.inf, float(flat.norm()))
    assert float(used.norm()) == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "poison"),
    [(math.nan, None), (math.inf, None), (-math.inf, None), (1.0, math.nan), (1.0, math.inf),
     (1.0, -math.inf)],
)  # fmt: skip
def test_what_is_not_finite_moves_nobody(
    loss: float, poison: float | None, groups: ParallelGroups
) -> None:
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
    for factors in bank.factors.values():
        assert all(arena.isfinite().all() for arena in (factors.lora_a, *factors.lora_b))
    for slot in SLOTS:
        accumulate(bank, slot, random_gradient(bank, slot, 5))
    outcomes = step_adapters(bank, groups, [request(slot, 0) for slot in SLOTS])
    assert [outcome.applied for outcome in outcomes] == [True, False, True]
    assert math.isnan(outcomes[1].loss)
    master = bank.adapters[1].slab.master[-1]
    assert torch.equal(master, torch.tensor(value)) or master.isnan(), "it is not made up"


def test_an_update_that_overflows_stops_its_job_at_the_next_step(groups: ParallelGroups) -> None:
    bank = make_bank()
    for step in range(2):
        accumulate(bank, 0, random_gradient(bank, 0, step))
        outcome = step_adapters(bank, groups, [request(0, step, lr=3e38)])[0]
        assert outcome.applied == (step == 0)
    assert not bank.adapters[0].slab.master.isfinite().all(), "the case must overflow"
    assert torch.cat(bank._copies[0]).isfinite().all()


def test_a_job_goes_on_after_a_skipped_step_as_if_it_had_not_been(groups: ParallelGroups) -> None:
    bank, clean = make_bank(), make_bank()
    updates = 0
    for step in range(4):
        flat = random_gradient(bank, 0, step)
        accumulate(bank, 0, flat)
        outcome = step_adapters(bank, groups, [request(0, updates, loss=math.nan if step == 2
                                                       else 1.0)])[0]  # fmt: skip
        if outcome.applied:
            accumulate(clean, 0, flat)
            step_adapters(clean, groups, [request(0, updates)])
        updates += outcome.applied
    assert updates == 3
    assert unmoved(state(clean, 0), state(bank, 0))


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


def test_a_rate_of_zero_moves_moments_only(groups: ParallelGroups) -> None:
    bank = make_bank()
    accumulate(bank, 0, random_gradient(bank, 0, 3))
    before = bank.adapters[0].slab.master.clone()
    assert step_adapters(bank, groups, [request(0, 0, lr=0.0)])[0].applied
    slab = bank.adapters[0].slab
    assert torch.equal(slab.master, before)
    assert slab.exp_avg.any()
    assert slab.exp_avg_sq.any()


def test_nobody_asked_nothing_done(groups: ParallelGroups) -> None:
    bank = make_bank()
    before = [state(bank, slot) for slot in SLOTS]
    assert step_adapters(bank, groups, []) == []
    assert all(unmoved(before[slot], state(bank, slot)) for slot in SLOTS)


def test_bf16_copies_follow_fp32_masters(groups: ParallelGroups) -> None:
    bank = make_bank(torch.bfloat16)
    slab = bank.adapters[0].slab
    before = slab.master.clone()
    for step in range(3):
        accumulate(bank, 0, random_gradient(bank, 0, step))
        step_adapters(bank, groups, [request(0, step, lr=1e-6)])
    # Each step is far below a bf16 digit, and still counts.
    assert slab.master.dtype == torch.float32
    moved = (slab.master - before).abs()
    assert 1e-7 < moved.mean() < 4e-6
    copies = torch.cat(bank._copies[0])
    assert copies.dtype == torch.bfloat16
    assert torch.equal(copies, slab.master.bfloat16())


def test_outcomes_are_values(groups: ParallelGroups) -> None:
    bank = make_bank()
    flat = random_gradient(bank, 2, 9)
    accumulate(bank, 2, flat)
    outcome = step_adapters(bank, groups, [request(2, 0, loss=0.75)])[0]
    assert outcome == StepOutcome(0.75, outcome.grad_norm, True)
    assert outcome.grad_norm == pytest.approx(float(flat.norm()), rel=1e-6)
