"""The memory that kernels read adapters from: the factors of every site, and of routed experts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.layers.slab import AdapterSlab, StatePlacement
from tlora_megatron.layers.slab_layout import SlabLayout
from tlora_megatron.ops.dropout import mix_ints
from tlora_megatron.ops.experts.branch import (
    CHUNK,
    ExpertArenas,
    ExpertFactors,
    ExpertTarget,
    OuterFactors,
    OuterSide,
    OuterTarget,
)
from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.lora.linear_ops import Gradients, SiteFactors
from tlora_megatron.ops.lora.tiling import RankLayout


class Caster(Protocol):
    """Writes one adapter's factors on routed experts into the arenas."""

    def write(self, master_N: Tensor) -> Tensor:
        """Writes master weights, rounded; returns fp32 `[]`: 0, or NaN where one is not finite."""
        ...


def expert_caster(slab: AdapterSlab, views: Sequence[Tensor]) -> Caster | None:
    """Returns the caster of an adapter; None if it has no factors on experts, or torch copies them.

    Args:
        views: of its factors in the compute dtype, in its slab's order.
    """
    layout = slab.layout
    if layout.lora.shares_outer or slab.placement != StatePlacement():
        return None
    pairs = [
        (factor.offset, view)
        for factor, view in zip(layout.factors, views, strict=True)
        if factor.experts is not None
    ]
    half = (torch.bfloat16, torch.float16)
    if not pairs or pairs[0][1].dtype not in half or not runs_triton(pairs[0][1]):
        return None
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.experts.triton_sums import CastFactor, FactorCaster

    return FactorCaster([CastFactor(*pair) for pair in pairs])


class ArenaRoom:
    """Gives arenas their memory, which may be kept while adapters come and go.

    Kept memory has rows to spare: adapters that stay in their slots are not copied when another
    one comes behind them. Where it must grow, an arena after the other is copied into a larger one.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, kept_ranks: int) -> None:
        self.dtype = dtype
        self.device = device
        self.is_kept = kept_ranks > 0
        self.has_moved = False
        """True if some arena has other memory than before the last `begin`."""
        self.kept_ranks = kept_ranks
        self._held: dict[Hashable, Tensor] = {}
        self._used: dict[Hashable, int] = {}
        """Rows that may be other than zero."""
        self._dirty: list[Tensor] = []

    def begin(self) -> None:
        """Notes that the arenas are made anew."""
        self.has_moved = not self.is_kept

    def zeros(self, key: Hashable, rows: int, columns: int, *, stay: int, kept: int) -> Tensor:
        """Returns `[rows, columns]`, zeros behind the rows that stay; `clear_dirty` must follow.

        Args:
            stay: number of its first rows that keep their values.
            kept: rows to keep memory for.
        """
        if not self.is_kept:
            return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        held = self._held.get(key)
        if held is None or len(held) < rows:
            room = max(kept, rows if held is None else rows * 5 // 4)
            larger = torch.zeros(room, columns, dtype=self.dtype, device=self.device)
            if held is not None and stay:
                larger[:stay] = held[:stay]
            self._held[key] = held = larger
            self.has_moved = True
        elif self._used[key] > stay:
            self._dirty.append(held[stay : self._used[key]])
        self._used[key] = rows
        return held[:rows]

    def clear_dirty(self) -> None:
        """Fills the rows of adapters that have gone with zeros."""
        dirty, self._dirty = self._dirty, []
        if dirty:
            torch._foreach_zero_(dirty)


Members = Literal["all", "standard", "block_diagonal", "own ranks"]
"""The factors of all jobs, of standard jobs, of block-diagonal jobs, or the part of standard jobs'
rank rows that this rank holds under s_lora."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arenas:
    """Makes the factors of sites, zeros."""

    loras: Sequence[LoraSpec]
    slabs: Sequence[AdapterSlab]
    scaling: Tensor
    dropout: Tensor
    room: ArenaRoom
    layouts: dict[tuple[object, ...], RankLayout]
    """Layouts made so far, by targets and members."""
    first: int
    """The first slot of another adapter than before; those before it keep their rows."""

    def make(
        self,
        site: Site,
        shards: Sequence[TargetShard],
        members: Members,
        before: SiteFactors | None,
    ) -> SiteFactors:
        """Returns the factors of one site; parts that these members never read take no memory.

        Args:
            before: what there was; None if no slot stays as it is.
        """
        layout = self._layout(site, shards, members)
        columns = [t.columns for t in shards]
        if site.lora_sharding == "s_lora" and site.kind == "row" and members == "standard":
            columns = [site.own_outputs for _ in shards]
        is_split = site.lora_sharding == "s_lora" and site.kind == "column"
        has_a = not (is_split and members == "standard")
        has_b = members != "own ranks"
        stay = 0 if before is None else self.first
        stay_a, stay_b = layout.a_rows, layout.b_rows
        if stay < len(layout.ranks):
            stay_a, stay_b = layout.a_begin[stay][0], layout.b_begin[stay]
        names, kept = [t.name for t in shards], 0
        if members != "block_diagonal":
            kept = -(-self.room.kept_ranks // (site.tp_size if members == "own ranks" else 1))
        none = tuple((None,) * len(shards) for _ in self.loras)
        return SiteFactors(
            layout=layout,
            columns=tuple(columns),
            lora_a=self._zeros(
                (site.index, members), layout.a_rows, site.in_size,
                stay=stay_a, kept=kept * len(shards), held=has_a,
            ),
            lora_b=tuple(
                self._zeros(
                    (site.index, members, p), rows, c.size, stay=stay_b[p], kept=kept, held=has_b
                )
                for p, (rows, c) in enumerate(zip(layout.b_rows, columns, strict=True))
            ),
            grad_a=self._grads(names, layout, "lora_a", before, stay) if has_a else none,
            grad_b=self._grads(names, layout, "lora_b", before, stay) if has_b else none,
            is_aligned=self._are_aligned(names, layout),
            scaling=self.scaling,
            dropout=self.dropout,
            has_dropout=any(lora.dropout > 0 for lora in self.loras),
            dropout_key=mix_ints(site.dropout_index),
            first_column=site.first_column,
        )  # fmt: skip

    def _layout(self, site: Site, shards: Sequence[TargetShard], members: Members) -> RankLayout:
        names = tuple(t.target for t in shards)
        key = (names, members)
        if key not in self.layouts:
            ranks = [_rank_of(lora, site, members) for lora in self.loras]
            rows = zip(self.loras, ranks, strict=True)
            self.layouts[key] = RankLayout(
                tuple(
                    tuple(rank * (name in lora.target_modules) for name in names)
                    for lora, rank in rows
                )
            )
        return self.layouts[key]

    def _zeros(
        self, key: Hashable, rows: int, columns: int, *, stay: int, kept: int, held: bool
    ) -> Tensor:
        if held:
            return self.room.zeros(key, rows, columns, stay=stay, kept=kept)
        return torch.zeros(1, 1, dtype=self.room.dtype, device=self.room.device).expand(
            rows, columns
        )

    def _grads(
        self,
        names: Sequence[str],
        layout: RankLayout,
        which: Literal["lora_a", "lora_b"],
        before: SiteFactors | None,
        stay: int,
    ) -> Gradients:
        kept: Gradients = ()
        if before is not None:
            kept = (before.grad_a if which == "lora_a" else before.grad_b)[:stay]
        pairs = zip(self.slabs[stay:], layout.ranks[stay:], strict=True)
        return kept + tuple(
            tuple(
                slab.grad_views.get(f"{name}.{which}") if rank else None
                for name, rank in zip(names, ranks, strict=True)
            )
            for slab, ranks in pairs
        )

    def _are_aligned(self, names: Sequence[str], layout: RankLayout) -> bool:
        """True if all gradients of the members lie where the fastest kernels can add to them."""
        return not any(
            rank and not slab.unaligned.isdisjoint((f"{name}.lora_a", f"{name}.lora_b"))
            for slab, ranks in zip(self.slabs, layout.ranks, strict=True)
            if slab.unaligned
            for name, rank in zip(names, ranks, strict=True)
        )


def _rank_of(lora: LoraSpec, site: Site, members: Members) -> int:
    """Returns an adapter's rank rows among the members; 0 where it is none of them."""
    if members == "own ranks":
        return 0 if lora.is_block_diagonal else site.rank_rows(lora.rank)[0]
    if members == "all" or (members == "block_diagonal") == lora.is_block_diagonal:
        return lora.local_rank(site.tp_size)
    return 0


RANK_ALIGNMENT = 8
"""Rank columns that an adapter's are filled up to: 16 bytes, which copies want."""


ExpertViews = dict[tuple[int, str], Tensor]
"""Factors of single routed experts in the arenas, shaped as in the slab, by slot and name."""


def expert_factors(
    site: Site, slabs: Sequence[AdapterSlab], scaling: Tensor, dtype: torch.dtype
) -> tuple[ExpertFactors, ExpertViews] | None:
    """Allocates the arenas of a linear of the routed experts, zeros; None if no adapter is on it.

    Args:
        slabs: of the adapters, slot by slot.
        scaling: fp32 `[slots]`.
    """
    # Adapters that share the outer factor have theirs in `outer_factors`.
    loras = [slab.layout.lora for slab in slabs]
    used = [
        [s for s in site.targets if s.target in lora.target_modules and not lora.shares_outer]
        for lora in loras
    ]
    positions = [0]
    for lora, shards in zip(loras, used, strict=True):
        end = positions[-1] + sum(lora.rank_of(shard.target) for shard in shards)
        positions.append(-(-end // RANK_ALIGNMENT) * RANK_ALIGNMENT)
    if not positions[-1]:
        return None
    assert site.experts is not None, "a dense linear"
    columns = max(shard.columns.begin + shard.columns.width for shard in site.targets)
    experts, ranks, device = len(site.experts), positions[-1], scaling.device
    arenas = ExpertArenas(
        lora_a=torch.zeros(experts, ranks, site.in_size, dtype=dtype, device=device),
        lora_b=torch.zeros(experts, ranks, columns, dtype=dtype, device=device),
        positions=torch.tensor([*positions, positions[-1]], dtype=torch.int32).to(device),
    )
    targets: list[tuple[ExpertTarget, ...]] = []
    views: ExpertViews = {}
    for slot, (slab, shards) in enumerate(zip(slabs, used, strict=True)):
        of_slot, begin = [], positions[slot]
        for shard in shards:
            rows = slice(begin, begin + loras[slot].rank_of(shard.target))
            own, a, b = _outputs(shard), f"{shard.name}.lora_a", f"{shard.name}.lora_b"
            views[slot, a], views[slot, b] = arenas.lora_a[:, rows], arenas.lora_b[:, rows, own]
            grads, begin = slab.grad_views, rows.stop
            of_slot.append(ExpertTarget(own, views[slot, a], views[slot, b], grads[a], grads[b]))
        targets.append(tuple(of_slot))
    return ExpertFactors(tuple(targets), scaling, arenas), views


def _outputs(shard: TargetShard) -> slice:
    """Returns the output columns that an expert's target adds to."""
    columns = shard.columns
    assert columns.groups == 1, "a target's columns of an expert lie side by side"
    return slice(columns.begin, columns.begin + columns.width)


OuterCopy = Mapping[str, Tensor]
"""One adapter's factors on routed experts in the compute dtype, by canonical name; empty for an
adapter that shares none."""


def make_outer_copy(layout: SlabLayout, dtype: torch.dtype, device: torch.device) -> OuterCopy:
    """Allocates the copies of an adapter's factors on routed experts, zeros."""
    if not layout.lora.shares_outer:
        return {}
    factors = [f for f in layout.factors if f.shard.target in layout.lora.expert_targets]
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
    lora, grads = slab.layout.lora, slab.grad_views
    shared, own, begin = [], [], 0
    for shard in shards:
        ranks = slice(begin, begin + lora.rank_of(shard.target))
        begin = ranks.stop
        for which in ("lora_a", "lora_b"):
            name = f"{shard.name}.{which}"
            weight, grad = copy[name], grads[name]
            columns = slice(0, shard.in_size) if which == "lora_a" else _outputs(shard)
            if lora.is_shared(shard.target, which):
                shared.append(OuterTarget(columns, ranks, weight[None], grad[None]))
            else:
                own.append(OuterTarget(columns, ranks, weight, grad))
    return tuple(shared), tuple(own)
