"""Three jobs with random weights for tests of the optimizer, and what torch does with one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.helpers.linear_case import SPEC
from tlora_megatron.config.job import LoraSpec, OptimizerSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.training.optimizer import StepRequest

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
