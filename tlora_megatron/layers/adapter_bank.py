"""All adapters of a super-model on this rank, and their weights as the linears' kernels read them.

The bank stays outside module registration: the base's state dict, DDP buckets and optimizer see
nothing of it, and adapters join or leave between steps without touching the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.arenas import (
    ArenaRoom,
    Arenas,
    Caster,
    ExpertViews,
    OuterCopy,
    expert_caster,
    expert_factors,
    make_outer_copy,
    outer_factors,
)
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.slab import AdapterSlab, StatePlacement
from tlora_megatron.layers.slab_layout import Factor, SlabLayout, slab_layout
from tlora_megatron.ops.experts.branch import ExpertFactors, OuterFactors
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.lora.kernel_choice import choose_ops
from tlora_megatron.ops.lora.linear_ops import LinearOps, SiteFactors


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """One job's adapter."""

    name: str
    lora: LoraSpec
    slab: AdapterSlab


@dataclass(frozen=True, kw_only=True, slots=True)
class BankShape:
    """The adapters that a bank may ever hold.

    It fixes which targets each site has, so that a job that joins or leaves changes no product and
    no rounding of the others.
    """

    targets: frozenset[str]
    block_targets: frozenset[str] = frozenset()
    """Those that block-diagonal adapters may have."""
    kept_ranks: int = 0
    """Memory for so many LoRA ranks of each target is kept for those who come; 0 = adapters that
    come or go have all others copied anew, into memory for the present ones."""

    @classmethod
    def of(cls, loras: Iterable[LoraSpec]) -> BankShape:
        """The least shape that holds all of some adapters."""
        loras = tuple(loras)
        blocks = (t for lora in loras if lora.is_block_diagonal for t in lora.target_modules)
        targets = (target for lora in loras for target in lora.target_modules)
        return cls(targets=frozenset(targets), block_targets=frozenset(blocks))

    def check_holds(self, name: str, lora: LoraSpec) -> None:
        """Refuses a job that the bank has no place for."""
        is_block = lora.is_block_diagonal
        held = self.block_targets if is_block else self.targets
        if missing := sorted(set(lora.target_modules) - held):
            kind = f"{lora.parametrization} adapters" if is_block else "adapters"
            raise ValueError(
                f"lora.target_modules of job {name!r} must be among those that this super-model "
                f"was opened for, got {', '.join(missing)}; it holds {kind} on "
                f"{', '.join(sorted(held)) or 'nothing'}. Another one must be started for the job"
            )


class AdapterBank:
    """The adapters in their slots, over the sites of this rank.

    Args:
        holds: the adapters of all jobs that it may ever hold, or their shape.
        ops: kernels that compute the linears; None = the fastest for this device and dtype.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        holds: Sequence[LoraSpec] | BankShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: LinearOps | None = None,
        placement: StatePlacement = StatePlacement(),  # noqa: B008 - frozen
    ) -> None:
        self.sites = tuple(sites)
        self.dtype = dtype
        self.device = device
        self.placement = placement
        self.ops = choose_ops(device, dtype) if ops is None else ops
        self.shape = holds if isinstance(holds, BankShape) else BankShape.of(holds)
        used = self.shape.targets
        self._targets = {
            site.index: tuple(t for t in site.targets if t.target in used) for site in self.sites
        }
        self._places = {
            shard.name: (site.index, p)
            for site in self.sites
            for p, shard in enumerate(self._targets[site.index])
        }
        self._room = ArenaRoom(dtype, device, kept_ranks=self.shape.kept_ranks)
        self.adapters: tuple[Adapter, ...] = ()
        self.fused_factors: dict[int, SiteFactors] = {}
        """Factors that share a GEMM, by `Site.index`; sites that no job targets have none. Those of
        all jobs where sites fold, elsewhere of standard jobs."""
        self.s_lora_a_factors: dict[int, SiteFactors] = {}
        """Column-parallel sites under s_lora: this rank's part of `lora_a`, which `factors` then
        lack."""
        self.block_diagonal_factors: dict[int, SiteFactors] = {}
        """Factors of block-diagonal jobs, where sites do not fold."""
        self.expert_factors: dict[int, ExpertFactors] = {}
        """Factors at routed experts of all jobs whose experts have their own, by `Site.index`."""
        self.outer_factors: dict[int, OuterFactors] = {}
        """Those of jobs whose experts share the outer ones."""
        self._expert_views: ExpertViews = {}
        self._outer_copies: list[OuterCopy] = []
        self._copies: list[list[Tensor]] = []
        """Views of a slot's factors in the arenas, in its slab's order (`_compute_views`)."""
        self._casters: list[Caster | None] = []
        """What casts a slot's factors on routed experts by itself."""
        self._casts: list[_Cast] = []
        """The weights of a slot on their way into the arenas: all in the same memory."""
        self.defects: list[Tensor] = []
        """For each slot fp32 `[]`: 0, or NaN where a weight of this rank is not finite in the
        compute dtype. It is added to the number that decides whether the job moves."""

    def new_slab(self, lora: LoraSpec) -> AdapterSlab:
        """Allocates an adapter's slab, zeros."""
        return AdapterSlab(self.slab_layout(lora), self.device, self.placement)

    def slab_layout(self, lora: LoraSpec) -> SlabLayout:
        """Returns where an adapter's factors lie in its slab on this rank."""
        return slab_layout(self.sites, lora)

    def is_rank_sharded(self, site: Site) -> bool:
        """Returns True if block-diagonal jobs may target a site.

        Every TP rank then has rows of `lora_a` of its own, whose gradient takes the linear's whole
        input.
        """
        return any(target.target in self.shape.block_targets for target in site.targets)

    def install(self, adapters: Sequence[Adapter]) -> None:
        """Puts adapters into slots 0, 1, ... in this order.

        Adapters that stay keep the gradient of a batch under way; those that join begin with none.
        """
        stay = {id(a.slab) for a in self.adapters}
        for adapter in adapters:
            if id(adapter.slab) not in stay:
                adapter.slab.zero_grad()
        first = 0
        if self._room.is_kept:  # the first slots whose adapters stay where they are
            pairs = zip(self.adapters, adapters, strict=False)
            first = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))
        if any(a.lora.expert_targets for a in (*self.adapters, *adapters)):
            first = 0  # their arenas are made anew
        kept = self._copies[:first], self.defects[:first]
        self.adapters = tuple(adapters)
        # Both hold the old arenas, which would otherwise stay in memory beside the new ones.
        self._copies, self._casts, self._casters = [], [], []
        self._build_factors(first)
        begin = 0 if self._room.has_moved else first
        views = [self._compute_views(slot, adapters[slot]) for slot in range(begin, len(adapters))]
        self._copies = [*kept[0][:begin], *views]
        self._casters = [
            expert_caster(adapter.slab, views)
            for adapter, views in zip(adapters, self._copies, strict=True)
        ]
        self._casts = self._make_casts(adapters)
        fresh = (torch.zeros((), device=self.device) for _ in adapters[first:])
        self.defects = [*kept[1], *fresh]
        for slot in range(first, len(adapters)):
            self.refresh(slot)

    def _build_factors(self, first: int) -> None:
        """Makes the arenas of all sites; sites of one make share a layout.

        Args:
            first: the first slot of another adapter than before. Arenas are zeros from there on.
        """
        tables = (self.fused_factors, self.s_lora_a_factors, self.block_diagonal_factors)
        before = [dict(table) if first else {} for table in tables]
        for table in (*tables, self.expert_factors, self.outer_factors):
            table.clear()
        fresh = [(a.slab.layout, self.dtype, self.device) for a in self.adapters[first:]]
        self._expert_views.clear()
        self._outer_copies[first:] = [make_outer_copy(*layout) for layout in fresh]
        if not self.adapters:
            return
        loras = [a.lora for a in self.adapters]
        scaling, dropout = ([lora.scaling for lora in loras], [lora.dropout for lora in loras])
        self._room.begin()
        arenas = Arenas(
            loras=loras,
            slabs=[adapter.slab for adapter in self.adapters],
            scaling=to_device(torch.tensor(scaling), self.device),
            dropout=to_device(torch.tensor(dropout), self.device),
            room=self._room,
            layouts={},
            first=first,
        )
        fused, own, blocks = before
        for site in self.sites:
            shards, index = self._targets[site.index], site.index
            if not shards:
                continue
            if site.experts is not None:
                found = expert_factors(site, arenas.slabs, arenas.scaling, self.dtype)
                if found is not None:
                    self.expert_factors[index], views = found
                    self._expert_views |= views
                outer = outer_factors(site, arenas.slabs, self._outer_copies, arenas.scaling)
                if outer is not None:
                    self.outer_factors[index] = outer
                continue
            if site.lora_sharding == "fold":
                self.fused_factors[index] = arenas.make(site, shards, "all", fused.get(index))
                continue
            if self.is_rank_sharded(site):
                self.block_diagonal_factors[index] = arenas.make(
                    site, shards, "block_diagonal", blocks.get(index)
                )
            self.fused_factors[index] = arenas.make(site, shards, "standard", fused.get(index))
            if site.lora_sharding == "s_lora" and site.kind == "column":
                self.s_lora_a_factors[index] = arenas.make(
                    site, shards, "own ranks", own.get(index)
                )
        self._room.clear_dirty()

    def _compute_views(self, slot: int, adapter: Adapter) -> list[Tensor]:
        """Returns views of a slot's factors in the arenas, unpadded, in its slab's order."""
        views = []
        for factor in adapter.slab.layout.factors:
            if factor.name in self._outer_copies[slot]:
                views.append(self._outer_copies[slot][factor.name].flatten())
                continue
            if factor.experts is not None:
                views.append(self._expert_views[slot, factor.name])
                continue
            index, p = self._places[factor.shard.name]
            factors = self.fused_factors[index]
            if adapter.lora.is_block_diagonal:
                factors = self.block_diagonal_factors.get(index, factors)
            elif factor.which == "lora_a":
                factors = self.s_lora_a_factors.get(index, factors)
            if factor.which == "lora_a":
                begin, arena = factors.layout.a_begin[slot][p], factors.lora_a
            else:
                begin, arena = factors.layout.b_begin[slot][p], factors.lora_b[p]
            rows = arena[begin : begin + factor.spread_shape[0]]
            views.append(rows.flatten() if factor.num_blocks == 1 else factor.diagonal(rows))
        return views

    def refresh(self, slot: int) -> None:
        """Copies an adapter's master weights into the arenas, without waiting for the device.

        Collective over the ranks that hold slices of them; offloaded ones are waited for.

        A weight that is not finite (an update that overflowed, a master beyond fp16) shows in
        `defects` and never reaches an arena: GEMM tiles that adapters share multiply each one's
        weights with zeros in the rows of the others, and 0 * inf is NaN.
        """
        slab, cast, caster = self.adapters[slot].slab, self._casts[slot], self._casters[slot]
        defect = torch.zeros((), device=self.device)
        if cast.factors:
            # Cast as one buffer first: copies between dtypes would be a launch a factor.
            if caster is None:
                slab.copy_weights(cast.buffer)
            else:
                cast.buffer.copy_(slab.master[: len(cast.buffer)])
            defect = torch.linalg.vector_norm(cast.buffer, math.inf).float() * 0
            cast.buffer.nan_to_num_()
            torch._foreach_copy_(self._copies[slot][: len(cast.factors)], cast.factors)
        self.defects[slot] = defect if caster is None else defect + caster.write(slab.master)

    def _make_casts(self, adapters: Sequence[Adapter]) -> list[_Cast]:
        """Returns each adapter's room, all in the same memory; equal ones share their views."""
        layouts = [adapter.slab.layout for adapter in adapters]
        cast = [
            [factor for factor in layout.factors if caster is None or factor.experts is None]
            for layout, caster in zip(layouts, self._casters, strict=True)
        ]
        most = max((sum(factor.numel for factor in own) for own in cast), default=0)
        room = torch.empty(most, dtype=self.dtype, device=self.device)
        known: dict[LoraSpec, _Cast] = {}
        for layout, own in zip(layouts, cast, strict=True):
            if layout.lora not in known:
                sizes = [factor.numel for factor in own]
                buffer = room[: sum(sizes)]
                pairs = zip(own, buffer.split_with_sizes(sizes), strict=True)
                known[layout.lora] = _Cast(buffer, [_source(layout, *pair) for pair in pairs])
        return [known[layout.lora] for layout in layouts]


class _Cast(NamedTuple):
    """Room for an adapter's weights in the compute dtype."""

    buffer: Tensor
    """`[numel]`."""
    factors: list[Tensor]
    """Its factors in the shapes of `AdapterBank._compute_views`."""


def _source(layout: SlabLayout, factor: Factor, flat: Tensor) -> Tensor:
    if factor.experts is not None and not layout.lora.shares_outer:
        return flat.view(factor.shape)
    return flat if factor.num_blocks == 1 else factor.blocks(flat.view(factor.shape))
