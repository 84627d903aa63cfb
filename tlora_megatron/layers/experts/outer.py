"""Adapters whose outer factor all routed experts of a layer share, as their products read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.layers.slab.layout import SlabLayout
from tlora_megatron.ops.experts.factors import CHUNK, OuterFactors, OuterSide, OuterTarget

OuterCopy = Mapping[str, Tensor]
"""One adapter's factors on routed experts in the compute dtype, by canonical name; empty for an
adapter that shares none."""


def make_outer_copy(layout: SlabLayout, dtype: torch.dtype, device: torch.device) -> OuterCopy:
    """Allocates the copies of an adapter's factors on routed experts, zeros."""
    lora = layout.lora
    factors = [f for f in layout.factors if f.shard.target in lora.expert_targets]
    if not lora.shares_outer:
        return {}
    flat = torch.zeros(sum(factor.numel for factor in factors), dtype=dtype, device=device)
    parts = flat.split_with_sizes([factor.numel for factor in factors])
    pairs = zip(factors, parts, strict=True)
    return {factor.name: part.view(factor.shape) for factor, part in pairs}


def outer_factors(
    site: Site, slabs: Sequence[AdapterSlab], copies: Sequence[OuterCopy], scaling: Tensor
) -> OuterFactors | None:
    """Returns the factors of adapters that share the outer one at one linear; None if none does.

    Args:
        slabs: of the adapters, slot by slot.
        copies: of the same.
        scaling: fp32 `[slots]`.
    """
    shared: list[tuple[OuterTarget, ...]] = []
    own: list[tuple[OuterTarget, ...]] = []
    width = 0
    for slab, copy in zip(slabs, copies, strict=True):
        shards = [s for s in site.targets if copy and s.target in slab.layout.lora.target_modules]
        sides = _sides(shards, slab, copy)
        shared.append(sides[0])
        own.append(sides[1])
        width = max(width, *(target.ranks.stop for target in sides[0]), 0)
    if not width:
        return None
    width = -(-width // CHUNK) * CHUNK
    return OuterFactors(OuterSide(tuple(shared)), OuterSide(tuple(own)), scaling, width)


def _sides(
    shards: Sequence[TargetShard], slab: AdapterSlab, copy: OuterCopy
) -> tuple[tuple[OuterTarget, ...], tuple[OuterTarget, ...]]:
    """Returns an adapter's shared factors at a linear, and its experts'."""
    lora, grads = slab.layout.lora, slab.grad_views()
    shared, own, begin = [], [], 0
    for shard in shards:
        ranks = slice(begin, begin + lora.rank_of(shard.target))
        begin = ranks.stop
        for which in ("lora_a", "lora_b"):
            name = f"{shard.name}.{which}"
            weight, grad = copy[name], grads[name]
            columns = slice(0, shard.in_size)
            if which == "lora_b":
                assert shard.columns.groups == 1, "a target's columns of an expert lie side by side"
                columns = slice(shard.columns.begin, shard.columns.begin + shard.columns.width)
            if lora.is_shared(shard.target, which):
                shared.append(OuterTarget(columns, ranks, weight[None], grad[None]))
            else:
                own.append(OuterTarget(columns, ranks, weight, grad))
    return tuple(shared), tuple(own)
