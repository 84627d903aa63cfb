"""The halves of a decoder layer that someone else built, and why our kernels may not compute one.

A half is attention or the MLP, with the norm before it and the residual sum behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from tlora_megatron.integrations.megatron.layer.built_parts import (
    BuiltNorm,
    built_norm,
    why_not_head_norms,
)
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.mixing import built_class
from tlora_megatron.integrations.megatron.layer.norm import RMSNorm
from tlora_megatron.integrations.megatron.layer.residual_stream import why_not_stream
from tlora_megatron.layers.transformer_engine.linear import TEProductMixin, why_not_te_product

Half = Literal["attention", "mlp"]
HALVES: tuple[Half, ...] = ("attention", "mlp")


class HalfNames(NamedTuple):
    """Names of a half's parts in its layer, and the kinds that they must be."""

    text: str
    module: str
    kind: type
    norm: str
    bda: str
    layers: tuple[type, ...]
    """Classes of layers whose half is computed as in a TransformerLayer."""
    recomputes_norm: str
    """The layer's attribute that says so, as the next one does."""
    norm_returns_residual: str


NAMES: Mapping[Half, HalfNames] = {
    "attention": HalfNames(
        "attention",
        "self_attention",
        SelfAttention,
        "input_layernorm",
        "self_attn_bda",
        (TransformerLayer, MoETransformerLayer),
        "recompute_input_layernorm",
        "_input_layernorm_returns_residual",
    ),
    "mlp": HalfNames(
        "MLP",
        "mlp",
        MLP,
        "pre_mlp_layernorm",
        "mlp_bda",
        (TransformerLayer, MLPLayer),
        "recompute_pre_mlp_layernorm",
        "_pre_mlp_layernorm_returns_residual",
    ),
}


def halves_of(layer: Any) -> tuple[Half, ...]:
    """Returns the halves that a layer has: one in HybridModel, none if it is of another kind."""
    if not isinstance(layer, TransformerLayer):
        return ()
    return tuple(half for half in HALVES if not _is_empty(layer, NAMES[half]))


def _is_empty(layer: Any, names: HalfNames) -> bool:
    parts = (getattr(layer, name) for name in (names.module, names.norm, names.bda))
    return all(isinstance(part, IdentityOp | IdentityFuncOp) for part in parts)


def why_not_half(layer: Any, half: Half) -> str | None:
    """Returns the first thing about half a built layer that our kernels do not compute, or None.

    Settings of the whole model are looked at by `conditions.why_not_config`.
    """
    names = NAMES[half]
    module = getattr(layer, names.module)
    if isinstance(module, BaseMoELayer):
        return "experts"
    for found, kinds in ((layer, names.layers), (module, (names.kind,))):
        if built_class(found) not in kinds:
            return f"a {built_class(found).__name__} is no {kinds[0].__name__}"
    if getattr(layer, names.norm_returns_residual, False):
        return f"{names.norm_returns_residual.lstrip('_')} is True"
    if getattr(layer, names.bda) is not get_bias_dropout_add:
        return f"{names.bda} is not Megatron's own"
    reason = _why_not_attention(layer) if half == "attention" else None
    return reason or _why_not_linears(layer, half)


def _why_not_attention(layer: Any) -> str | None:
    for name in ("cross_attention", "pre_cross_attn_layernorm"):
        if not isinstance(getattr(layer, name, None), IdentityOp | None):
            return f"it has {name}"
    attention = layer.self_attention
    if not isinstance(attention.core_attention, PackedCoreAttention):
        return f"its core attention is a {type(attention.core_attention).__name__}"
    if attention.config.kv_channels % 8:
        return f"heads must be of a multiple of 8, got {attention.config.kv_channels}"
    return why_not_head_norms(attention)


def _why_not_linears(layer: Any, half: Half) -> str | None:
    norm, column, row = norm_and_linears(layer, half)
    if norm is None:
        return "its norm is no RMSNorm of torch, Transformer Engine or this package"
    reason = why_not_stream(layer.config, column)
    if reason is not None:
        return reason
    for linear, kind in ((column, ColumnParallelLinear), (row, RowParallelLinear)):
        reason = _why_not_linear(linear, kind)
        if reason is not None:
            return reason
    return None


def _why_not_linear(linear: Any, kind: type) -> str | None:
    if isinstance(linear, TEProductMixin):
        return why_not_te_product(linear)
    if built_class(linear) is not kind:
        return f"a {built_class(linear).__name__} computes by itself"
    if getattr(linear, "gather_output", False):
        return "a linear gathers its output"
    if kind is RowParallelLinear and linear.bias is not None:
        return "a row-parallel linear has a bias"
    return None


def norm_and_linears(layer: Any, half: Half) -> tuple[BuiltNorm | RMSNorm | None, Any, Any]:
    """Returns the norm of a half, None if our kernels do not compute it, and its two linears."""
    names = NAMES[half]
    module = getattr(layer, names.module)
    if half == "attention":
        linears = module.linear_qkv, module.linear_proj
    else:
        linears = module.linear_fc1, module.linear_fc2
    return _norm_before(getattr(layer, names.norm), linears[0]), *linears


def _norm_before(module: Any, linear: Any) -> BuiltNorm | RMSNorm | None:
    """The norm of the layer, or the one that Transformer Engine's linear begins with."""
    if not hasattr(linear, "layer_norm_weight"):
        return built_norm(module)
    is_inside = isinstance(module, IdentityOp) and linear.normalization == "RMSNorm"
    return BuiltNorm(linear, "layer_norm_weight") if is_inside else None
