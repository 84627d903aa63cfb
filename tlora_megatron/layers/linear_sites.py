"""Sites of plain linears, as Hugging Face models have them: nothing fused, one target each.

Linears with the names of Llama's have the same names of factors and the same dropout as Megatron's
fused ones, so that a job's state can go from one to the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tlora_megatron.layers.sites import LINEAR_TARGETS, Site, TargetShard, stage_sites
from tlora_megatron.model.backbone import Backbone, LinearsSpec
from tlora_megatron.model.layout import ExpertPlace, ParallelLayout
from tlora_megatron.ops.lora.linear_ops import OutputColumns

_FUSED = {target: index for index, held in enumerate(LINEAR_TARGETS.values()) for target in held}
"""Place of the Megatron linear that holds a target."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlainSite(Site):
    """One plain linear of one layer, the only target on itself."""

    position: int
    """Index of the linear in its layer."""
    num_linears: int
    """Linears in a layer."""
    num_layers: int

    @property
    def index(self) -> int:
        """Index of the site, unique over the model."""
        return self.layer * self.num_linears + self.position

    @property
    def dropout_index(self) -> int:
        """Index of the Megatron linear that holds the target: q, k and v drop the same."""
        if self.linear in _FUSED:
            return self.layer * len(LINEAR_TARGETS) + _FUSED[self.linear]
        return self.num_layers * len(LINEAR_TARGETS) + self.index


def rank_sites(
    spec: Backbone,
    layout: ParallelLayout,
    *,
    tp_rank: int,
    pp_rank: int,
    place: ExpertPlace = ExpertPlace(),  # noqa: B008 - frozen
) -> tuple[Site, ...]:
    """Returns all linears of one rank that may carry adapters, layer by layer."""
    if isinstance(spec, LinearsSpec):
        return _plain_sites(spec, tp_rank, layout.tp_size)
    return stage_sites(spec, layout, tp_rank=tp_rank, pp_rank=pp_rank, place=place)


@functools.cache
def _plain_sites(spec: LinearsSpec, tp_rank: int, tp_size: int) -> tuple[Site, ...]:
    return tuple(
        _plain_site(spec, layer, position, tp_rank, tp_size)
        for layer in range(spec.num_layers)
        for position in range(len(spec.linears))
    )


def _plain_site(
    spec: LinearsSpec, layer: int, position: int, tp_rank: int, tp_size: int
) -> PlainSite:
    linear = spec.linears[position]
    out_size, in_size = linear.out_size, linear.in_size
    rows = columns = None
    if tp_size > 1 and linear.kind == "column":
        out_size //= tp_size
        rows = tp_rank * out_size + torch.arange(out_size)
    elif tp_size > 1:
        in_size //= tp_size
        columns = slice(tp_rank * in_size, (tp_rank + 1) * in_size)
    shard = TargetShard(
        layer=layer,
        target=linear.target,
        columns=OutputColumns(groups=1, stride=out_size, begin=0, width=out_size),
        lora_a_columns=columns,
        lora_b_rows=rows,
        in_size=in_size,
    )
    return PlainSite(
        layer=layer,
        linear=linear.target,
        kind=linear.kind,
        tp_rank=tp_rank,
        tp_size=tp_size,
        in_size=in_size,
        out_size=out_size,
        targets=(shard,),
        position=position,
        num_linears=len(spec.linears),
        num_layers=spec.num_layers,
    )
