"""All adapters of a super-model on this rank, and their weights as the linears' kernels read them.

The bank stays outside module registration: the base's state dict, DDP buckets and optimizer see
nothing of it, and adapters join or leave between steps without touching the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.layers.slab import AdapterSlab, StatePlacement
from tlora_megatron.layers.slab_layout import SlabLayout, slab_layout
from tlora_megatron.ops.dropout.masks import mix_ints
from tlora_megatron.ops.lora.factors import Gradients, SiteFactors, are_aligned
from tlora_megatron.ops.lora.kernel_choice import choose_ops
from tlora_megatron.ops.lora.linear_ops import LinearOps
from tlora_megatron.ops.lora.tiling import RankLayout


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

    @classmethod
    def of(cls, loras: Iterable[LoraSpec]) -> BankShape:
        """The least shape that holds all of some adapters."""
        loras = tuple(loras)
        blocks = (t for lora in loras if lora.is_block_diagonal for t in lora.target_modules)
        targets = (target for lora in loras for target in lora.target_modules)
        return cls(targets=frozenset(targets), block_targets=frozenset(blocks))

    def check_holds(self, name: str, lora: LoraSpec) -> None:
        """Refuses a job that the bank has no place for.

        Raises:
            ValueError: naming the job and the targets.
        """
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
        sites: the linears that may carry adapters, on this rank.
        holds: the adapters of all jobs that it may ever hold, or their shape.
        dtype: of the compute copies.
        ops: kernels that compute the linears; None = the fastest for this device and dtype.
        placement: of the adapters' master weights and moments.
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
        used, blocks = self.shape.targets, self.shape.block_targets
        self._targets = {
            site.index: tuple(t for t in site.targets if t.target in used) for site in self.sites
        }
        self._rank_sharded = {
            site.index for site in self.sites if any(t.target in blocks for t in site.targets)
        }
        self.adapters: tuple[Adapter, ...] = ()
        self.fused_factors: dict[int, SiteFactors] = {}
        """Factors that share a GEMM, by `Site.index`; sites that no job targets have none. Those of
        all jobs where sites fold, elsewhere of standard jobs."""
        self.s_lora_a_factors: dict[int, SiteFactors] = {}
        """Column-parallel sites under s_lora: this rank's part of `lora_a`, which `factors` then
        lack."""
        self.block_diagonal_factors: dict[int, SiteFactors] = {}
        """Factors of block-diagonal jobs, where sites do not fold."""
        self._copies: list[list[torch.Tensor]] = []
        """Views of a slot's factors in the arenas, in its slab's order (`_compute_views`)."""
        self._casts: list[_Cast] = []
        """The weights of a slot on their way into the arenas: all in the same memory."""
        self.defects: list[torch.Tensor] = []
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
        return site.index in self._rank_sharded

    def install(self, adapters: Sequence[Adapter]) -> None:
        """Puts adapters into slots 0, 1, ... in this order.

        Adapters that stay keep the gradient of a batch under way; those that join begin with none.
        """
        stay = {id(a.slab) for a in self.adapters}
        for adapter in adapters:
            if id(adapter.slab) not in stay:
                adapter.slab.zero_grad()
        self.adapters = tuple(adapters)
        # Both hold the old arenas, which would otherwise stay in memory beside the new ones.
        self._copies, self._casts = [], []
        for factors in (self.fused_factors, self.s_lora_a_factors, self.block_diagonal_factors):
            factors.clear()
        self._build_factors()
        self._copies = [self._compute_views(s, a) for s, a in enumerate(adapters)]
        self._casts = _casts([a.slab.layout for a in adapters], self.dtype, self.device)
        self.defects = [torch.zeros((), device=self.device) for _ in adapters]
        for slot in range(len(adapters)):
            self.refresh(slot)

    def _build_factors(self) -> None:
        """Makes the arenas of all sites, zeros; sites of one make share a layout."""
        if not self.adapters:
            return
        loras = [a.lora for a in self.adapters]
        arenas = _Arenas(
            loras=loras,
            grads=[adapter.slab.grad_views() for adapter in self.adapters],
            scaling=torch.tensor([lora.scaling for lora in loras], device=self.device),
            dropout=torch.tensor([lora.dropout for lora in loras], device=self.device),
            dtype=self.dtype,
            layouts={},
        )
        for site in self.sites:
            shards, index = self._targets[site.index], site.index
            if not shards:
                continue
            if site.lora_sharding == "fold":
                self.fused_factors[index] = arenas.make(site, shards, "all")
                continue
            if self.is_rank_sharded(site):
                self.block_diagonal_factors[index] = arenas.make(site, shards, "block_diagonal")
            self.fused_factors[index] = arenas.make(site, shards, "standard")
            if site.lora_sharding == "s_lora" and site.kind == "column":
                self.s_lora_a_factors[index] = arenas.make(site, shards, "own ranks")

    def _compute_views(self, slot: int, adapter: Adapter) -> list[torch.Tensor]:
        """Returns views of a slot's factors in the arenas, unpadded, in its slab's order."""
        places = {
            shard.name: (site.index, p)
            for site in self.sites
            for p, shard in enumerate(self._targets[site.index])
        }
        views = []
        for factor in adapter.slab.layout.factors:
            index, p = places[factor.shard.name]
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
        if self._copies[slot]:
            # Cast as one buffer first: copies between dtypes would be a launch a factor.
            cast = self._casts[slot]
            self.adapters[slot].slab.copy_weights(cast.buffer)
            self.defects[slot] = torch.linalg.vector_norm(cast.buffer, math.inf).float() * 0
            cast.buffer.nan_to_num_()
            torch._foreach_copy_(self._copies[slot], cast.factors)


Members = Literal["all", "standard", "block_diagonal", "own ranks"]
"""The factors of all jobs, of standard jobs, of block-diagonal jobs, or the part of standard jobs'
rank rows that this rank holds under s_lora."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Arenas:
    """Makes the factors of sites, zeros."""

    loras: Sequence[LoraSpec]
    grads: Sequence[Mapping[str, torch.Tensor]]
    """For each slot by canonical name."""
    scaling: torch.Tensor
    dropout: torch.Tensor
    dtype: torch.dtype
    layouts: dict[tuple[object, ...], RankLayout]
    """Layouts made so far, by targets and members."""

    def make(self, site: Site, shards: Sequence[TargetShard], members: Members) -> SiteFactors:
        """Returns the factors of one site; parts that these members never read take no memory."""
        layout = self._layout(site, shards, members)
        columns = [t.columns for t in shards]
        if site.lora_sharding == "s_lora" and site.kind == "row" and members == "standard":
            columns = [site.own_outputs for _ in shards]
        is_split = site.lora_sharding == "s_lora" and site.kind == "column"
        has_a = not (is_split and members == "standard")
        has_b = members != "own ranks"
        grad_a, grad_b = (self._grads(shards, layout, which) for which in ("lora_a", "lora_b"))
        none = tuple((None,) * len(shards) for _ in self.loras)
        return SiteFactors(
            layout=layout,
            columns=tuple(columns),
            lora_a=self._zeros(layout.a_rows, site.in_size, held=has_a),
            lora_b=tuple(
                self._zeros(rows, c.size, held=has_b)
                for rows, c in zip(layout.b_rows, columns, strict=True)
            ),
            grad_a=grad_a if has_a else none,
            grad_b=grad_b if has_b else none,
            is_aligned=are_aligned(grad_a) and are_aligned(grad_b),
            scaling=self.scaling,
            dropout=self.dropout,
            has_dropout=any(lora.dropout > 0 for lora in self.loras),
            dropout_key=mix_ints(site.dropout_index),
            first_column=site.first_column,
        )

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

    def _zeros(self, rows: int, columns: int, *, held: bool) -> torch.Tensor:
        device = self.scaling.device
        if held:
            return torch.zeros(rows, columns, dtype=self.dtype, device=device)
        return torch.zeros(1, 1, dtype=self.dtype, device=device).expand(rows, columns)

    def _grads(self, shards: Sequence[TargetShard], layout: RankLayout, which: str) -> Gradients:
        return tuple(
            tuple(
                views.get(f"{t.name}.{which}") if rank else None
                for t, rank in zip(shards, ranks, strict=True)
            )
            for views, ranks in zip(self.grads, layout.ranks, strict=True)
        )


def _rank_of(lora: LoraSpec, site: Site, members: Members) -> int:
    """Returns an adapter's rank rows among the members; 0 where it is none of them."""
    if members == "own ranks":
        return 0 if lora.is_block_diagonal else site.rank_rows(lora.rank)[0]
    if members == "all" or (members == "block_diagonal") == lora.is_block_diagonal:
        return lora.local_rank(site.tp_size)
    return 0


class _Cast(NamedTuple):
    """Room for an adapter's weights in the compute dtype."""

    buffer: torch.Tensor
    """`[numel]`."""
    factors: list[torch.Tensor]
    """Its factors in the shapes of `AdapterBank._compute_views`."""


def _casts(layouts: Sequence[SlabLayout], dtype: torch.dtype, device: torch.device) -> list[_Cast]:
    """Returns each layout's room, all in the same memory; equal layouts share their views."""
    room = torch.empty(max([x.numel for x in layouts], default=0), dtype=dtype, device=device)
    known: dict[LoraSpec, _Cast] = {}
    for layout in layouts:
        if layout.lora not in known:
            buffer = room[: layout.numel]
            known[layout.lora] = _Cast(buffer, _sources(layout, buffer))
    return [known[layout.lora] for layout in layouts]


def _sources(layout: SlabLayout, copy: torch.Tensor) -> list[torch.Tensor]:
    """Returns a slab's buffer in the shapes of `_compute_views`."""
    return [
        flat if factor.num_blocks == 1 else factor.blocks(flat.view(factor.shape))
        for factor, flat in zip(layout.factors, layout.split(copy), strict=True)
    ]
