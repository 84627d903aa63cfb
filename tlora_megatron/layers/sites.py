"""A site: one linear that carries adapters, and how a target's factors lie on it.

All routed experts of a layer that a rank holds are one site for each of their two linears.

Column-parallel: `lora_a` replicated over TP, `lora_b` sharded over rows. Row-parallel: `lora_a`
sharded over columns, `lora_b` replicated. The replicated factor's gradient is a partial sum, added
over TP once an optimizer step. Under s_lora the replicated factor is sharded too: `lora_a` of
column-parallel linears over its rank rows, `lora_b` of row-parallel ones over its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tlora_megatron.model.backbone import Backbone, LinearsSpec
from tlora_megatron.model.layout import ExpertPlace, LoraSharding, ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.lora.linear_ops import OutputColumns

LINEAR_TARGETS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "linear_qkv"),
    "linear_proj": ("o_proj", "linear_proj"),
    "linear_fc1": ("gate_proj", "up_proj", "linear_fc1"),
    "linear_fc2": ("down_proj", "linear_fc2"),
}
"""Targets that live on each Megatron linear of a dense layer."""
SHARED_EXPERT_LINEARS: dict[str, tuple[str, ...]] = {
    "shared_fc1": ("shared_expert.gate_proj", "shared_expert.up_proj"),
    "shared_fc2": ("shared_expert.down_proj",),
}
"""Targets that live on the linears of a shared expert, in models that have one."""
EXPERT_LINEARS: dict[str, tuple[str, ...]] = {
    "experts_fc1": ("experts.gate_proj", "experts.up_proj", "experts.linear_fc1"),
    "experts_fc2": ("experts.down_proj", "experts.linear_fc2"),
}
"""Targets that live on the linears of routed experts; each expert has its own factors."""
ALL_LINEARS = LINEAR_TARGETS | SHARED_EXPERT_LINEARS
"""Those of dense linears, whose rows are the micro-batch's."""
_BEYOND = ((SHARED_EXPERT_LINEARS, 1 << 20), (EXPERT_LINEARS, 1 << 21))
"""Index of layer 0's shared expert and of its routed experts, beyond any dense linear's; dropout
masks depend on them."""
_COLUMN = ("linear_qkv", "linear_fc1", "shared_fc1", "experts_fc1")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TargetShard:
    """One target at one layer as this TP rank holds it."""

    layer: int
    target: str
    columns: OutputColumns
    lora_a_columns: slice | None
    """Columns of the whole `lora_a` held here; None = all (replicated)."""
    lora_b_rows: Tensor | None
    """int64 rows of the whole `lora_b` held here, in local order; None = all (replicated)."""
    in_size: int
    """Number of local input features."""

    @property
    def name(self) -> str:
        """Canonical name of the target module, for example `layers.3.q_proj`."""
        return f"layers.{self.layer}.{self.target}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Site:
    """One linear module of this rank with all targets that may be adapted on it."""

    layer: int
    linear: str
    """A key of `ALL_LINEARS` or `EXPERT_LINEARS`."""
    kind: Literal["column", "row"]
    tp_rank: int
    tp_size: int
    in_size: int
    out_size: int
    targets: tuple[TargetShard, ...]
    lora_sharding: LoraSharding = "fold"
    """The sharding of standard adapters; fold wherever there is nothing to share."""
    experts: range | None = None
    """Numbers of the routed experts that this rank holds; None = a dense linear. The TP rank and
    size are then those that cut each expert."""

    @property
    def index(self) -> int:
        """Index of the site, unique over the model."""
        for linears, first in _BEYOND:
            if self.linear in linears:
                return first + self.layer * len(linears) + list(linears).index(self.linear)
        return self.layer * len(LINEAR_TARGETS) + list(LINEAR_TARGETS).index(self.linear)

    @property
    def dropout_index(self) -> int:
        """Key of this linear's dropout."""
        return self.index

    @property
    def first_column(self) -> int:
        """Global index of the first local input feature."""
        return self.in_size * self.tp_rank if self.kind == "row" else 0

    def rank_rows(self, rank: int) -> tuple[int, slice]:
        """Returns this rank's part of a standard `lora_a` under s_lora: rows a rank, and its rows.

        Ranks have equally many, `ceil(rank / tp_size)`; the last ones fill theirs up with zeros.
        """
        size = -(-rank // self.tp_size)
        begin = min(self.tp_rank * size, rank)
        return size, slice(begin, min(begin + size, rank))

    @property
    def own_outputs(self) -> OutputColumns:
        """A row-parallel linear's columns that a standard `lora_b` writes here under s_lora."""
        begin, end = (self.out_size * i // self.tp_size for i in (self.tp_rank, self.tp_rank + 1))
        return OutputColumns(groups=1, stride=self.out_size, begin=begin, width=end - begin)


def make_site(
    spec: ModelSpec,
    layer: int,
    linear: str,
    tp_rank: int,
    tp_size: int,
    lora_sharding: LoraSharding = "fold",
) -> Site:
    """Describes the linear `linear` of global layer `layer` on one TP rank."""
    out_size, in_size = spec.target_shape(linear)
    kind: Literal["column", "row"] = "column" if linear in _COLUMN else "row"
    if kind == "column":
        out_size //= tp_size
    else:
        in_size //= tp_size
    columns = _output_columns(spec, linear, out_size, tp_size)
    targets = tuple(
        TargetShard(
            layer=layer,
            target=target,
            columns=columns[target],
            lora_a_columns=slice(tp_rank * in_size, (tp_rank + 1) * in_size)
            if kind == "row"
            else None,
            lora_b_rows=_lora_b_rows(spec, target, tp_rank, tp_size) if kind == "column" else None,
            in_size=in_size,
        )
        for target in (ALL_LINEARS | EXPERT_LINEARS)[linear]
    )
    return Site(
        layer=layer,
        linear=linear,
        kind=kind,
        tp_rank=tp_rank,
        tp_size=tp_size,
        in_size=in_size,
        out_size=out_size,
        targets=targets,
        lora_sharding=lora_sharding if tp_size > 1 else "fold",
    )


@functools.cache
def stage_sites(
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    tp_rank: int,
    pp_rank: int,
    place: ExpertPlace = ExpertPlace(),  # noqa: B008 - frozen
) -> tuple[Site, ...]:
    """Returns all linears of one rank that may carry adapters, layer by layer.

    Routed experts come behind all dense linears.

    Cached: the writer asks for those of every rank whenever a job is saved, 0.2 s for 70B and TP 8.
    """
    linears = _stage_linears(spec, layout, pp_rank)
    dense = tuple(
        make_site(spec, layer, linear, tp_rank, layout.tp_size, layout.lora_sharding)
        for layer, linear in linears
        if linear in ALL_LINEARS
    )
    return dense + tuple(
        make_expert_site(spec, layer, linear, layout, place)
        for layer, linear in linears
        if linear in EXPERT_LINEARS
    )


def make_expert_site(
    spec: ModelSpec, layer: int, linear: str, layout: ParallelLayout, place: ExpertPlace
) -> Site:
    """Describes one linear of the routed experts that a rank holds of a layer."""
    assert spec.experts is not None, "the model has none"
    site = make_site(spec, layer, linear, place.tp_rank, layout.expert_tp)
    count = spec.experts.num_experts // layout.ep_size
    first = count * place.ep_rank
    return replace(site, experts=range(first, first + count))


def _stage_linears(
    spec: ModelSpec, layout: ParallelLayout, pp_rank: int
) -> Sequence[tuple[int, str]]:
    if layout.stage_linears is not None:
        return layout.stage_linears[pp_rank]
    layers = layout.stage_layers(spec.num_layers, pp_rank)
    linears = tuple(LINEAR_TARGETS if spec.experts is None else ("linear_qkv", "linear_proj"))
    if spec.experts is not None and spec.shared_ffn_size is not None:
        linears += tuple(SHARED_EXPERT_LINEARS)
    if spec.experts is not None:
        linears += tuple(EXPERT_LINEARS)
    return [(layer, linear) for layer in layers for linear in linears]


def check_targets(spec: Backbone, layout: ParallelLayout, job: str, targets: Sequence[str]) -> None:
    """Refuses targets that some layer of a built model lacks: an adapter covers all layers."""
    if layout.stage_linears is None:
        return
    held = {pair for stage in layout.stage_linears for pair in stage}
    for linear, of_linear in (ALL_LINEARS | EXPERT_LINEARS).items():
        wanted = [target for target in targets if target in of_linear]
        missing = [layer for layer in range(spec.num_layers) if (layer, linear) not in held]
        if wanted and missing:
            raise ValueError(
                f"job {job!r}: lora.target_modules must name linears that every layer has, got "
                f"{wanted[0]!r}, which layer {missing[0]} lacks"
            )


def qkv_row_order(spec: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> Tensor:
    """Returns the rows of the whole `[q; k; v]` in the order of one rank's `linear_qkv`.

    Returns:
        int64 `[(q_size + 2 * kv_size) / tp_size]`.
    """
    heads, groups, dim = spec.num_heads // tp_size, spec.num_kv_heads // tp_size, spec.head_dim
    q = torch.arange(spec.q_size).view(tp_size, groups, heads // groups * dim)
    k = torch.arange(spec.kv_size).view(tp_size, groups, dim) + spec.q_size
    return torch.cat([q, k, k + spec.kv_size], dim=2)[tp_rank].flatten()


def fc1_row_order(spec: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> Tensor:
    """Returns the rows of the whole `[gate; up]` in the order of one rank's `linear_fc1`.

    Returns:
        int64 `[2 * ffn_size / tp_size]`.
    """
    gate = torch.arange(spec.ffn_size).view(tp_size, -1)
    return torch.cat([gate, gate + spec.ffn_size], dim=1)[tp_rank]


def _output_columns(
    spec: ModelSpec, linear: str, out_size: int, tp_size: int
) -> dict[str, OutputColumns]:
    """Returns each target's columns in the local output; q, k, v lie group by group."""
    whole = OutputColumns(groups=1, stride=out_size, begin=0, width=out_size)
    if linear == "linear_qkv":
        groups = spec.num_kv_heads // tp_size
        head = spec.head_dim
        q = spec.num_heads // spec.num_kv_heads * head
        begins = {"q_proj": (0, q), "k_proj": (q, head), "v_proj": (q + head, head)}
        stride = q + 2 * head
        parts = {
            name: OutputColumns(groups=groups, stride=stride, begin=begin, width=width)
            for name, (begin, width) in begins.items()
        }
        return {**parts, "linear_qkv": whole}
    targets = (ALL_LINEARS | EXPERT_LINEARS)[linear]
    if linear in ("linear_fc1", "shared_fc1", "experts_fc1"):
        half = out_size // 2
        gate, up, *fused = targets
        return {
            gate: OutputColumns(groups=1, stride=out_size, begin=0, width=half),
            up: OutputColumns(groups=1, stride=out_size, begin=half, width=half),
            **dict.fromkeys(fused, whole),
        }
    return dict.fromkeys(targets, whole)


def _lora_b_rows(spec: ModelSpec, target: str, tp_rank: int, tp_size: int) -> Tensor:
    """Returns the rows of the whole `lora_b` on this rank, in the order of local output columns."""
    if target in ("linear_fc1", "experts.linear_fc1"):
        return fc1_row_order(spec, tp_rank, tp_size)
    if target == "linear_qkv":
        return qkv_row_order(spec, tp_rank, tp_size)
    local = spec.target_shape(target)[0] // tp_size
    return tp_rank * local + torch.arange(local)


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
