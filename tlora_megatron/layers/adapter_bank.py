"""All adapters of a super-model on this rank, and their weights stacked for grouped GEMMs.

The bank stays outside module registration: the base's state dict, DDP buckets and optimizer see
nothing of it, and adapters join or leave between steps without touching the others.

Shapes: S slots + 1 (the last, all zeros, is the null slot), P targets on a site, R padded rank,
K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tlora_megatron.job import LoraSpec
from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.layers.slab import AdapterSlab, slab_layout
from tlora_megatron.ops.row_groups import RowGroups

_RANK_MULTIPLE = 8
"""Grouped GEMMs need rows of 16 bytes, eight bf16 values."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """One job's adapter."""

    name: str
    lora: LoraSpec
    slab: AdapterSlab


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SiteStack:
    """Weights and gradient accumulators of all adapters at one site.

    `lora_a` of target p fills rows `p * R` onward of `lora_a_SRK`; unused rows are zero, and stay
    so.
    """

    targets: tuple[TargetShard, ...]
    rank: int
    """R."""
    lora_a_SRK: torch.Tensor
    """`[S + 1, P * R, K]`, compute dtype."""
    lora_b_SRN: tuple[torch.Tensor, ...]
    """One a target, transposed: `[S + 1, R, N]`, compute dtype."""
    grad_a_SRK: torch.Tensor
    """fp32."""
    grad_b_SRN: tuple[torch.Tensor, ...]
    """fp32."""

    def factor(self, slot: int, target: str, which: str, *, grad: bool) -> torch.Tensor:
        """One padded factor of one adapter, `[R, features]`, contiguous."""
        p = [t.target for t in self.targets].index(target)
        if which == "lora_b":
            return (self.grad_b_SRN if grad else self.lora_b_SRN)[p][slot]
        stack = self.grad_a_SRK if grad else self.lora_a_SRK
        return stack[slot, p * self.rank : (p + 1) * self.rank]


class AdapterBank:
    """The adapters in their slots, over the sites of this rank.

    Args:
        sites: the linears that may carry adapters, on this rank.
        loras: of every job the run may ever hold: fixes the padded rank of each site, so that a job
            leaving changes no shape and no rounding of the others.
        dtype: of the compute copies.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        loras: Sequence[LoraSpec],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sites = tuple(sites)
        self.dtype = dtype
        self.device = device
        self._loras = tuple(loras)
        self.adapters: tuple[Adapter, ...] = ()
        self.stacks: dict[int, SiteStack] = {}
        """By `Site.index`; sites that no job targets have none."""
        self._scaling_S = torch.zeros(1)
        self._dropout_S = torch.zeros(1)
        self._copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """Flat views of a slot's factors in the stacks, in its slab's order: compute, gradients."""

    def new_slab(self, lora: LoraSpec) -> AdapterSlab:
        """Allocates an adapter's slab, zeros."""
        return AdapterSlab(slab_layout(self.sites, lora), self.device)

    def install(self, adapters: Sequence[Adapter]) -> None:
        """Puts adapters into slots 0, 1, ... in this order.

        Those that stay keep the gradient of a batch they are in the middle of.
        """
        kept = {a.name: self.take_gradient(slot) for slot, a in enumerate(self.adapters)}
        self.adapters = tuple(adapters)
        zero = [0.0]
        self._scaling_S = torch.tensor(
            [a.lora.scaling for a in adapters] + zero, device=self.device
        )
        self._dropout_S = torch.tensor(
            [a.lora.dropout for a in adapters] + zero, device=self.device
        )
        # Both hold the old stacks, which would otherwise stay in memory beside the new ones.
        self._copies = []
        self.stacks.clear()
        for site in self.sites:
            stack = self._new_stack(site)
            if stack is not None:
                self.stacks[site.index] = stack
        self._copies = [self._views(slot, adapter) for slot, adapter in enumerate(adapters)]
        for slot, adapter in enumerate(adapters):
            self.refresh(slot)
            if adapter.name in kept:
                self._add_gradient(slot, kept[adapter.name])

    def _new_stack(self, site: Site) -> SiteStack | None:
        loras = [
            lora
            for lora in self._loras
            if any(t.target in lora.target_modules for t in site.targets)
        ]
        if not loras:
            return None
        used = {target for lora in loras for target in lora.target_modules}
        targets = tuple(t for t in site.targets if t.target in used)
        rank = -(-max(lora.rank for lora in loras) // _RANK_MULTIPLE) * _RANK_MULTIPLE
        slots = len(self.adapters) + 1
        shape_a = (slots, len(targets) * rank, site.in_size)
        shapes_b = [(slots, rank, t.columns.size) for t in targets]

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return SiteStack(
            targets=targets,
            rank=rank,
            lora_a_SRK=zeros(shape_a, self.dtype),
            lora_b_SRN=tuple(zeros(s, self.dtype) for s in shapes_b),
            grad_a_SRK=zeros(shape_a, torch.float32),
            grad_b_SRN=tuple(zeros(s, torch.float32) for s in shapes_b),
        )

    def _views(self, slot: int, adapter: Adapter) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        compute, grads = [], []
        by_target = {(t.layer, t.target): site.index for site in self.sites for t in site.targets}
        for shard, which, _, (rank, _) in adapter.slab.layout.factors:
            stack = self.stacks[by_target[shard.layer, shard.target]]
            compute.append(stack.factor(slot, shard.target, which, grad=False)[:rank].flatten())
            grads.append(stack.factor(slot, shard.target, which, grad=True)[:rank].flatten())
        return compute, grads

    def refresh(self, slot: int) -> None:
        """Copies an adapter's master weights into the compute stacks."""
        compute, _ = self._copies[slot]
        slab = self.adapters[slot].slab
        if compute:
            # Cast as one buffer first: copies between dtypes would be a launch a factor.
            torch._foreach_copy_(compute, slab.layout.split(slab.master.to(self.dtype)))

    def take_gradient(self, slot: int) -> torch.Tensor:
        """Returns a slot's accumulated gradient as a fresh slab, fp32 `[numel]`, and clears it."""
        layout = self.adapters[slot].slab.layout
        flat = torch.empty(layout.numel, device=self.device)
        grads = self._copies[slot][1]
        if grads:
            torch._foreach_copy_(layout.split(flat), grads)
            torch._foreach_zero_(grads)
        return flat

    def _add_gradient(self, slot: int, flat: torch.Tensor) -> None:
        grads = self._copies[slot][1]
        if grads:
            torch._foreach_add_(grads, self.adapters[slot].slab.layout.split(flat))

    def row_scaling(self, rows: RowGroups) -> torch.Tensor:
        """`scaling` of each row's adapter, fp32 `[T, 1]`."""
        return rows.cached(
            "scaling", lambda: self._scaling_S[rows.row_slots(self.device)].unsqueeze(1)
        )

    def row_dropout(self, rows: RowGroups) -> torch.Tensor | None:
        """Dropout probability of each row's adapter, fp32 `[T]`; None where no row has any."""
        active = rows.dropout_keys and any(
            self.adapters[s].lora.dropout for s in rows.present_slots
        )
        if not active:
            return None
        return rows.cached("dropout", lambda: self._dropout_S[rows.row_slots(self.device)])
