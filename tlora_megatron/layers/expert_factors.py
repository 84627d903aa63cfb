"""The factors of adapters on routed experts as their kernels read them: two arenas a linear."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.layers.slab_layout import SlabLayout
from tlora_megatron.ops.experts.branch import ExpertArenas, ExpertFactors, ExpertTarget
from tlora_megatron.ops.experts.factors import CHUNK, OuterFactors, OuterSide, OuterTarget

RANK_ALIGNMENT = 8
"""Rank columns that an adapter's are filled up to: 16 bytes, which copies want."""


class _Span(NamedTuple):
    """The rank columns of one target of one adapter."""

    shard: TargetShard
    begin: int
    end: int

    @property
    def output(self) -> slice:
        """Output columns that it adds to."""
        columns = self.shard.columns
        assert columns.groups == 1, "a target's columns of an expert lie side by side"
        return slice(columns.begin, columns.begin + columns.width)


def expert_factors(
    site: Site, slabs: Sequence[AdapterSlab], scaling: Tensor, dtype: torch.dtype
) -> ExpertFactors | None:
    """Allocates the arenas of a linear of the routed experts, zeros; None if no adapter is on it.

    Args:
        slabs: of the adapters, slot by slot.
        scaling: fp32 `[slots]`.
    """
    spans: list[tuple[_Span, ...]] = []
    positions = [0]
    for slab in slabs:
        spans.append(tuple(_spans(site, slab, positions[-1])))
        end = spans[-1][-1].end if spans[-1] else positions[-1]
        positions.append(-(-end // RANK_ALIGNMENT) * RANK_ALIGNMENT)
    if not positions[-1]:
        return None
    assert site.experts is not None, "a dense linear"
    used = tuple(itertools.chain.from_iterable(spans))
    columns = max(shard.columns.begin + shard.columns.width for shard in site.targets)
    experts, ranks, device = len(site.experts), positions[-1], scaling.device
    arenas = ExpertArenas(
        lora_a=torch.zeros(experts, ranks, used[0].shard.in_size, dtype=dtype, device=device),
        lora_b=torch.zeros(experts, ranks, columns, dtype=dtype, device=device),
        positions=torch.tensor([*positions, positions[-1]], dtype=torch.int32).to(device),
    )
    targets = tuple(
        tuple(_target(span, slab, arenas) for span in of_slot)
        for of_slot, slab in zip(spans, slabs, strict=True)
    )
    return ExpertFactors(targets, scaling, arenas)


def expert_views(
    factors: ExpertFactors, site: Site, slab: AdapterSlab, slot: int
) -> dict[str, Tensor]:
    """Returns a slot's factors in the arenas by canonical name, in the shapes of its slab."""
    views = {}
    for span, target in zip(_spans(site, slab, 0), factors.targets[slot], strict=True):
        views[f"{span.shard.name}.lora_a"] = target.lora_a
        views[f"{span.shard.name}.lora_b"] = target.lora_b
    return views


def _spans(site: Site, slab: AdapterSlab, begin: int) -> Iterator[_Span]:
    lora = slab.layout.lora
    if lora.shares_outer:  # `layers.expert_factors`
        return
    for shard in site.targets:
        if shard.target in lora.target_modules:
            end = begin + lora.rank_of(shard.target)
            yield _Span(shard, begin, end)
            begin = end


def _target(span: _Span, slab: AdapterSlab, arenas: ExpertArenas) -> ExpertTarget:
    grads, ranks = slab.grad_views(), slice(span.begin, span.end)
    return ExpertTarget(
        columns=span.output,
        lora_a=arenas.lora_a[:, ranks],
        lora_b=arenas.lora_b[:, ranks, span.output],
        grad_a=grads[f"{span.shard.name}.lora_a"],
        grad_b=grads[f"{span.shard.name}.lora_b"],
    )


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
