"""The factors of adapters on routed experts as their kernels read them: two arenas a linear."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.ops.experts.branch import ExpertArenas, ExpertFactors, ExpertTarget

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
        dtype: of the arenas.
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
    if lora.shares_outer:  # `layers.experts.outer`
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
