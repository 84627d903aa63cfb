"""Finds a model's linears that may carry adapters, replaces them, and leaves routed experts frozen.

Under ZeRO-3 a module's own hooks gather its weight before forward and before backward. What is
saved for backward is the parameter, not its data, so backward reads the gathered weight again.

Shapes: T rows, K features in, N features out, as this rank holds them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from torch import Tensor, nn

from tlora_megatron.layers.linear import LinearLayout, computes_base, multi_lora_linear
from tlora_megatron.layers.multi_adapter import MultiAdapter, make_multi_adapter
from tlora_megatron.layers.sites import Site, stage_sites
from tlora_megatron.model.backbone import LinearShape, LinearsSpec
from tlora_megatron.model.spec import refuse_gpt_oss
from tlora_megatron.ops.routing import current_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups

_NO_EXPERTS = "routed experts carry no adapters"
_REFUSED = {
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), _NO_EXPERTS),
    "gate": "routers carry no adapters",
    "shared_expert_gate": "it only weighs the shared expert",
}
"""Names that PEFT takes for parts of routed experts, or of what weighs them."""


def has_experts(model: Any) -> bool:
    """Returns True for a model with routed experts, which transformers calls so everywhere."""
    return any("experts" in name.split(".") for name, _ in model.named_modules())


_IN_LAYER = re.compile(r"(?P<above>.*?)\.(?P<layer>\d+)\.(?P<below>.+)")


class _Found(NamedTuple):
    """A linear of one layer."""

    layer: int
    path: str
    """With `{}` for the layer."""
    shape: tuple[int, int]


def model_spec(model: Any) -> LinearsSpec:
    """Describes a model whose weights are still whole, unless `zero.Init` has divided them.

    Raises:
        ValueError: if it has no embedding, no plain output layer, or no layers with linears, or is
            gpt-oss, whose sinks packed attention does not pass on.
    """
    config = model.config.get_text_config()
    refuse_gpt_oss(config.model_type, "the base of a DeepSpeed run")
    layers = _decoder_layers(model)
    by_target: dict[str, list[_Found]] = defaultdict(list)
    refused = dict(_REFUSED) if has_experts(model) else {}
    for name, module in model.named_modules():
        match = _IN_LAYER.fullmatch(name)
        if match is None or not name.startswith(f"{layers}."):
            continue
        below = match["below"]
        target = below.rsplit(".", 1)[-1]
        if isinstance(module, nn.Linear):
            reason = _why_not(module, below)
            path = f"{match['above']}.{{}}.{below}"
            by_target[target].append(_Found(int(match["layer"]), path, weight_shape(module)))
            if reason:
                refused[target] = reason
        elif _is_other_linear(module) and target not in refused:
            refused[target] = f"{type(module).__name__} is no nn.Linear"
    num_layers = len(model.get_submodule(layers))
    linears = []
    for target, found in by_target.items():
        reason = refused.get(target) or _why_not_everywhere(found, num_layers)
        if reason:
            refused[target] = reason
        else:
            out_size, in_size = found[0].shape
            linears.append(
                LinearShape(target=target, path=found[0].path, out_size=out_size, in_size=in_size)
            )
    return LinearsSpec(
        num_layers=num_layers,
        vocab_size=weight_shape(_output_layer(model))[0],
        max_positions=_max_positions(config),
        linears=tuple(linears),
        refused=tuple(sorted(refused.items())),
        sliding_window=_sliding_window(config),
    )


def _decoder_layers(model: Any) -> str:
    """Module name of the list of decoder layers: the longest list of modules with linears."""
    lists = [
        (len(module), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and any(isinstance(m, nn.Linear) for m in module.modules())
        and not _IN_LAYER.match(name)
    ]
    if not lists:
        raise ValueError(
            f"the model must have a list of decoder layers with linears, got {type(model).__name__}"
        )
    return max(lists)[1]


def _output_layer(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        kind = "one with a bias" if isinstance(head, nn.Linear) else type(head).__name__
        raise ValueError(f"the model's output layer must be an nn.Linear without bias, got {kind}")
    return head


def weight_shape(module: Any) -> tuple[int, int]:
    """`(out, in)` of a linear's weight on this rank, also where ZeRO-3 holds a part of it."""
    weight = module.weight
    out_size, in_size = getattr(weight, "ds_shape", weight.shape)
    return int(out_size), int(in_size)


def _why_not(module: nn.Linear, below: str) -> str:
    if any(part.isdigit() for part in below.split(".")):
        return _NO_EXPERTS
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is no plain nn.Linear"
    return ""


def _is_other_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and len(getattr(weight, "ds_shape", weight.shape)) == 2


def _why_not_everywhere(found: Sequence[_Found], num_layers: int) -> str:
    paths = sorted({f.path for f in found})
    if len(paths) > 1:
        return f"it names several linears of a layer, {', '.join(paths)}"
    if [f.layer for f in found] != list(range(num_layers)):
        return f"only {len(found)} of {num_layers} layers have it"
    if len({f.shape for f in found}) > 1:
        return "its size is not the same in all layers"
    return ""


def _max_positions(config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ValueError(
            f"the model's config must hold max_position_embeddings, got {type(config).__name__}"
        )
    return positions


def _sliding_window(config: Any) -> int | None:
    """Returns the tokens that a query sees in some layer; None without windows."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    if kinds is None and not getattr(config, "use_sliding_window", True):
        return None
    return window


def sharded_spec(model: Any, spec: LinearsSpec, groups: ParallelGroups) -> LinearsSpec:
    """Adds to the model's description how AutoTP has sharded each linear.

    Raises:
        ValueError: if AutoTP left a linear whole, or did not cut it into equal consecutive parts.
    """
    tp_size = groups.layout.tp_size
    if tp_size == 1:
        return spec
    linears, refused = [], dict(spec.refused)
    for linear in spec.linears:
        module = model.get_submodule(linear.path.format(0))
        kind = _KINDS.get(type(module))
        cut, part = linear.out_size, (linear.out_size // tp_size, linear.in_size)
        if kind == "row":
            cut, part = linear.in_size, (linear.out_size, linear.in_size // tp_size)
        if kind is None:
            refused[linear.target] = f"AutoTP made it a {type(module).__name__}"
        elif cut % tp_size or weight_shape(module) != part:
            refused[linear.target] = f"AutoTP cuts its {cut} {kind}s into unequal parts"
        else:
            linears.append(replace(linear, kind=kind))
    return replace(spec, linears=tuple(linears), refused=tuple(sorted(refused.items())))


_KINDS: dict[type, Any] = {LinearLayer: "column", LinearAllreduce: "row"}


def prepare_linears(
    model: Any, spec: LinearsSpec, groups: ParallelGroups
) -> tuple[tuple[Site, nn.Module], ...]:
    """Pairs every site of this rank with its module, which becomes a multi-adapter one in place."""
    sites = stage_sites(spec, groups.layout, tp_rank=groups.tp_rank, pp_rank=groups.pp_rank)
    pairs = [(s, model.get_submodule(spec.module_path(s.layer, s.linear))) for s in sites]
    for _, module in pairs:
        if not isinstance(module, MultiAdapter):
            make_multi_adapter(module, _MIXINS[type(module)])
    return tuple(pairs)


class _LinearMixin(MultiAdapter):
    """The part that the mixins have in common: this rank's GEMM."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def adapter_layout(self, site: Site) -> LinearLayout:
        """Returns the layout over AutoTP's group, or of one rank where it has cut nothing."""
        group = getattr(self, "mp_group", None)
        reduces_dgrad = group is not None and site.kind == "column"
        return LinearLayout(
            kind=site.kind, group=group, tp_size=site.tp_size, reduces_dgrad=reduces_dgrad
        )

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Returns this rank's GEMM with the adapters in it; None where there are none."""
        view, gemm = current_micro_batch(), self.tlora_adapters.gemm
        if view is None or gemm is None or not computes_base(gemm, view):
            return None
        return multi_lora_linear(x, self.weight, bias, gemm, view)


class ColumnLinearMixin(_LinearMixin):
    """Overrides the forward of a whole linear, `[1, T, K]` to `[1, T, N]`, without a collective,
    and of AutoTP's column-parallel one: x whole, y the rank's columns, dx all-reduced."""

    def forward(self, x: Tensor) -> Tensor:
        product = self._product(x, self.bias)
        return super().forward(x) if product is None else product  # type: ignore[misc]


class RowLinearMixin(_LinearMixin):
    """Overrides AutoTP's row-parallel linear: x the rank's features, y all-reduced with the branch
    in it; no collective in backward."""

    mp_group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        product = self._product(x, None)
        if product is None:
            return super().forward(x)  # type: ignore[misc]
        y: Tensor = _ReduceForward.apply(product, self.mp_group)
        return y if self.bias is None else y + self.bias


class _ReduceForward(torch.autograd.Function):
    """Sums over a group in forward; backward passes on.

    AutoTP's own loses the sum where its input is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        y = y.contiguous()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


_MIXINS: dict[type[nn.Module], type[MultiAdapter]] = {
    nn.Linear: ColumnLinearMixin,
    LinearLayer: ColumnLinearMixin,
    LinearAllreduce: RowLinearMixin,
}
