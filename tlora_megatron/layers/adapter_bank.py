"""All adapters of a super-model on this rank, and their weights as the linears' kernels read them.

The bank stays outside module registration: the base's state dict, DDP buckets and optimizer see
nothing of it, and adapters join or leave between steps without touching the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tlora_megatron.job import LoraSpec
from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.layers.slab import AdapterSlab, StatePlacement
from tlora_megatron.layers.slab_layout import SlabLayout, slab_layout
from tlora_megatron.ops.dropout import mix_ints
from tlora_megatron.ops.factors import SiteFactors
from tlora_megatron.ops.kernel_choice import choose_ops
from tlora_megatron.ops.linear_ops import LinearOps
from tlora_megatron.ops.tiling import RankLayout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """One job's adapter."""

    name: str
    lora: LoraSpec
    slab: AdapterSlab


class AdapterBank:
    """The adapters in their slots, over the sites of this rank.

    Args:
        sites: the linears that may carry adapters, on this rank.
        loras: of every job the run may ever hold: fixes which targets each site has, so that a job
            leaving changes no product and no rounding of the others.
        dtype: of the compute copies.
        ops: what computes the linears; None = the fastest that this device and dtype have.
        placement: of the adapters' master weights and moments.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        loras: Sequence[LoraSpec],
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
        used = {target for lora in loras for target in lora.target_modules}
        self._targets = {
            site.index: tuple(t for t in site.targets if t.target in used) for site in self.sites
        }
        cut = {target for lora in loras if lora.is_block_diagonal for target in lora.target_modules}
        self._cut = {s.index for s in self.sites if any(t.target in cut for t in s.targets)}
        self.adapters: tuple[Adapter, ...] = ()
        self.factors: dict[int, SiteFactors] = {}
        """By `Site.index`; sites that no job targets have none."""
        self._copies: list[list[torch.Tensor]] = []
        """Views of a slot's factors in the arenas, in its slab's order (`_compute_views`)."""
        self.defects: list[torch.Tensor] = []
        """A slot: fp32 `[]`, 0, or NaN where a weight of this rank is not finite in the compute
        dtype: to be added to what decides whether the job moves."""

    def new_slab(self, lora: LoraSpec) -> AdapterSlab:
        """Allocates an adapter's slab, zeros."""
        return AdapterSlab(slab_layout(self.sites, lora), self.device, self.placement)

    def is_cut_by_rank(self, site: Site) -> bool:
        """Whether block-diagonal jobs may target a site: every TP rank then has rows of `lora_a` of
        its own, whose gradient takes the linear's whole input."""
        return site.index in self._cut

    def install(self, adapters: Sequence[Adapter]) -> None:
        """Puts adapters into slots 0, 1, ... in this order.

        Those that stay keep the gradient of a batch they are in the middle of; those that join
        begin with none.
        """
        stay = {id(a.slab) for a in self.adapters}
        for adapter in adapters:
            if id(adapter.slab) not in stay:
                adapter.slab.zero_grad()
        self.adapters = tuple(adapters)
        # Both hold the old arenas, which would otherwise stay in memory beside the new ones.
        self._copies = []
        self.factors.clear()
        self._build_factors()
        places = {
            shard.name: (self.factors[index], p)
            for index in self.factors
            for p, shard in enumerate(self._targets[index])
        }
        self._copies = [_compute_views(s, a, places) for s, a in enumerate(adapters)]
        self.defects = [torch.zeros((), device=self.device) for _ in adapters]
        for slot in range(len(adapters)):
            self.refresh(slot)

    def _build_factors(self) -> None:
        """Makes the arenas of all sites, zeros; sites of one make share a layout."""
        if not self.adapters:
            return
        loras = [a.lora for a in self.adapters]
        scaling = torch.tensor([lora.scaling for lora in loras], device=self.device)
        dropout = torch.tensor([lora.dropout for lora in loras], device=self.device)
        grads = [adapter.slab.grad_views() for adapter in self.adapters]
        layouts: dict[tuple[str, ...], RankLayout] = {}
        for site in self.sites:
            shards = self._targets[site.index]
            if not shards:
                continue
            names = tuple(t.target for t in shards)
            if names not in layouts:
                layouts[names] = _rank_layout(names, loras, site.tp_size)
            layout = layouts[names]
            self.factors[site.index] = SiteFactors(
                layout=layout,
                columns=tuple(t.columns for t in shards),
                lora_a=self._zeros(layout.a_rows, site.in_size),
                lora_b=tuple(
                    self._zeros(rows, t.columns.size)
                    for rows, t in zip(layout.b_rows, shards, strict=True)
                ),
                grad_a=_by_target(grads, shards, "lora_a"),
                grad_b=_by_target(grads, shards, "lora_b"),
                scaling=scaling,
                dropout=dropout,
                has_dropout=any(lora.dropout > 0 for lora in loras),
                dropout_key=mix_ints(site.dropout_index),
                first_column=site.first_column,
            )

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

    def refresh(self, slot: int) -> None:
        """Copies an adapter's master weights into the arenas, without waiting for the device.

        Collective over the ranks that hold slices of them; offloaded ones are waited for.

        What is not finite there (an update that overflowed, a master beyond fp16) shows in
        `defects` and never reaches an arena: GEMM tiles that adapters share multiply each one's
        weights with zeros in the rows of the others, and 0 * inf is NaN.
        """
        slab = self.adapters[slot].slab
        if self._copies[slot]:
            # Cast as one buffer first: copies between dtypes would be a launch a factor.
            cast = slab.compute_copy(self.dtype)
            self.defects[slot] = torch.linalg.vector_norm(cast, math.inf).float() * 0
            torch._foreach_copy_(self._copies[slot], _sources(slab.layout, cast.nan_to_num_()))


def _rank_layout(targets: Sequence[str], loras: Sequence[LoraSpec], tp_size: int) -> RankLayout:
    return RankLayout(
        tuple(
            tuple(lora.local_rank(tp_size) * (target in lora.target_modules) for target in targets)
            for lora in loras
        )
    )


def _by_target(
    grads: Sequence[dict[str, torch.Tensor]], shards: Sequence[TargetShard], which: str
) -> tuple[tuple[torch.Tensor | None, ...], ...]:
    return tuple(tuple(views.get(f"{t.name}.{which}") for t in shards) for views in grads)


def _compute_views(
    slot: int, adapter: Adapter, places: Mapping[str, tuple[SiteFactors, int]]
) -> list[torch.Tensor]:
    """A slot's factors in the arenas, without padding, in its slab's order: flat, or the blocks.

    Args:
        places: by `TargetShard.name`: the site's factors and the target's number there.
    """
    views = []
    for factor in adapter.slab.layout.factors:
        factors, p = places[factor.shard.name]
        if factor.which == "lora_a":
            begin, arena = factors.layout.a_begin[slot][p], factors.lora_a
        else:
            begin, arena = factors.layout.b_begin[slot][p], factors.lora_b[p]
        rows = arena[begin : begin + factor.spread_shape[0]]
        views.append(rows.flatten() if factor.num_blocks == 1 else factor.diagonal(rows))
    return views


def _sources(layout: SlabLayout, copy: torch.Tensor) -> list[torch.Tensor]:
    """A slab's buffer in the shapes of `_compute_views`."""
    return [
        flat if factor.num_blocks == 1 else factor.blocks(flat.view(factor.shape))
        for factor, flat in zip(layout.factors, layout.split(copy), strict=True)
    ]
