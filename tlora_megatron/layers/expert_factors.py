"""The factors of adapters on routed experts as their kernels read them: one buffer an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.layers.slab.layout import SlabLayout
from tlora_megatron.ops.experts.branch import ExpertFactors, ExpertTarget

ExpertCopy = Mapping[str, Tensor]
"""One adapter's factors on routed experts in the compute dtype, by canonical name."""


def make_expert_copy(layout: SlabLayout, dtype: torch.dtype, device: torch.device) -> ExpertCopy:
    """Allocates the copies of an adapter's factors, zeros; none where experts share some."""
    if layout.lora.shares_outer:
        return {}
    factors = [factor for factor in layout.factors if factor.experts is not None]
    flat = torch.zeros(layout.numel - layout.experts_begin, dtype=dtype, device=device)
    parts = flat.split_with_sizes([factor.numel for factor in factors])
    pairs = zip(factors, parts, strict=True)
    return {factor.name: part.view(factor.shape) for factor, part in pairs}


def expert_factors(
    site: Site, slabs: Sequence[AdapterSlab], copies: Sequence[ExpertCopy], scaling: Tensor
) -> ExpertFactors | None:
    """Returns the factors of all adapters at one linear of the routed experts; None if none has.

    Args:
        slabs: of the adapters, slot by slot.
        copies: of the same.
        scaling: fp32 `[slots]`.
    """
    targets = tuple(
        tuple(
            _target(shard, slab, copy)
            for shard in site.targets
            if shard.target in slab.layout.lora.target_modules
            and not slab.layout.lora.shares_outer  # `layers.outer_factors`
        )
        for slab, copy in zip(slabs, copies, strict=True)
    )
    return ExpertFactors(targets, scaling) if any(targets) else None


def _target(shard: TargetShard, slab: AdapterSlab, copy: ExpertCopy) -> ExpertTarget:
    name_a, name_b = f"{shard.name}.lora_a", f"{shard.name}.lora_b"
    grads, columns = slab.grad_views(), shard.columns
    assert columns.groups == 1, "a target's columns of an expert lie side by side"
    return ExpertTarget(
        columns=slice(columns.begin, columns.begin + columns.width),
        lora_a=copy[name_a],
        lora_b=copy[name_b],
        grad_a=grads[name_a],
        grad_b=grads[name_b],
    )
