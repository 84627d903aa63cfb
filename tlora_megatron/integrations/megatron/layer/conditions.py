"""The halves of a decoder layer that someone else built, and why our kernels may not compute one.

`LAYER` and `HEAD` are tables: a field of TransformerConfig, the values that the kernels compute,
and why others stay with the modules. A field that a version lacks has its first value there.

A half is attention or the MLP, with the norm before it and the residual sum behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused, get_bias_dropout_add
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.modules import built_class
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import (
    BuiltNorm,
    Norm,
    built_norm,
    why_not_head_norms,
)
from tlora_megatron.layers.transformer_engine import (
    TEProductMixin,
    is_te_linear,
    why_not_te_product,
)

_ARITHMETIC = "our kernels compute something else"
_TE_INSIDE = "it is computed inside Transformer Engine's linears"
_NOT_YET = "our kernels do not compute it yet"
_OFFLOADING = "activations that our kernels save are not offloaded"


class Condition(NamedTuple):
    """Values of a field under which a part may run by our kernels."""

    field: str
    allowed: tuple[Any, ...]
    why: str = _ARITHMETIC
    since: tuple[int, int] = (0, 16)
    """The first megatron-core that has the field."""
    half: Literal["attention", "mlp"] | None = None
    """The half of a layer that it is about; None = both, or the head."""


LAYER: tuple[Condition, ...] = (
    Condition("fp4", (None,), "FP4 is computed by Transformer Engine"),
    Condition("quant_recipe", (None,), _TE_INSIDE),
    Condition("tp_comm_overlap", (False,), "it overlaps inside Transformer Engine's linears"),
    Condition("symmetric_ar_type", (None,), _TE_INSIDE),
    Condition("delay_wgrad_compute", (False,), _TE_INSIDE),
    Condition("use_kitchen", (False,), "its linears quantise"),
    Condition("use_transformer_engine_op_fuser", (False,), _TE_INSIDE, (0, 18)),
    Condition("batch_invariant_mode", (False,), "it asks for kernels of its own"),
    Condition("qk_l2_norm", (False,), _NOT_YET, half="attention"),
    Condition("normalization", ("RMSNorm",)),
    Condition("fused_residual_rmsnorm", (False,), "its norm returns the residual", (0, 17)),
    Condition("activation_func", (F.silu,), half="mlp"),
    Condition("gated_linear_unit", (True,), half="mlp"),
    Condition("activation_func_clamp_value", (None,), half="mlp"),
    Condition("glu_linear_offset", (0.0,), half="mlp"),
    Condition("use_te_activation_func", (False,), "it is Transformer Engine's", half="mlp"),
    Condition("activation_func_fp8_input_store", (False,), "its input is kept in FP8", half="mlp"),
    Condition("use_fused_weighted_squared_relu", (False,), half="mlp"),
    Condition(
        "use_grouped_gemm_for_dense_mlp", (False,), "it is another GEMM", (0, 18), half="mlp"
    ),
    Condition("add_bias_linear", (False,)),
    Condition("hidden_dropout", (0.0,)),
    Condition("attention_dropout", (0.0,), half="attention"),
    Condition("multi_latent_attention", (False,), half="attention"),
    Condition("attention_output_gate", (False,), half="attention"),
    Condition("experimental_attention_variant", (None,), half="attention"),
    Condition("softmax_type", ("vanilla",), half="attention"),
    Condition("window_size", (None,), half="attention"),
    Condition("qk_clip", (False,), half="attention"),
    Condition("apply_query_key_layer_scaling", (False,), half="attention"),
    Condition("rotary_interleaved", (False,), half="attention"),
    Condition("no_rope_freq", (None,), half="attention"),
    Condition("fused_single_qkv_rope", (False,), "it is Transformer Engine's", half="attention"),
    Condition("apply_residual_connection_post_layernorm", (False,)),
    Condition("enable_mhc_connections", (False,), since=(0, 20)),
    Condition("use_mup", (False,), since=(0, 17)),
    Condition("inference_fuse_tp_communication", (False,), "it is for inference"),
    Condition("cpu_offloading", (False,), _OFFLOADING),
    Condition("fine_grained_activation_offloading", (False,), _OFFLOADING),
)
"""Conditions on decoder layers; the first that does not hold is the reason that the log gives."""

FP8: tuple[Condition, ...] = (
    Condition("disable_parameter_transpose_cache", (False,), "FP8 weights are kept by columns too"),
    Condition("fp8_quantizer_factory", (None,), "its quantisers are not known"),
)
"""Further conditions of decoder layers with FP8."""

HEAD: tuple[Condition, ...] = (
    Condition("fp8_output_proj", (False,), "the output layer is in FP8", (0, 18)),
    Condition("mtp_num_layers", (None, 0), "its losses take the logits of all rows"),
    Condition("use_mup", (False,), "logits are scaled", (0, 17)),
    Condition("config_logger_dir", ("",), "it writes the logits of all rows"),
    Condition("defer_embedding_wgrad_compute", (False,), "the output layer keeps its input"),
)
"""Conditions on the output layer and the loss."""


def why_not_config(
    config: Any, conditions: Sequence[Condition], half: str | None = None
) -> str | None:
    """Returns the first field with another value, and why that matters; None if all hold.

    Args:
        half: of a layer; None = both.
    """
    for field, allowed, why, _, about in conditions:
        if half is not None and about not in (half, None):
            continue
        value = getattr(config, field, allowed[0])
        if value not in allowed:
            return f"{field} is {getattr(value, '__name__', None) or value}: {why}"
    return None


def why_not_stream(config: Any, column: Any) -> str | None:
    """Returns why a half must add to the residual stream by itself; None if our kernels may."""
    if not config.fp32_residual_connection:
        return None
    if not is_te_linear(column):
        return "fp32_residual_connection is True: linears of the local spec take no fp32 rows"
    if not _sums_in_fp32():
        return "fp32_residual_connection is True: this megatron-core rounds the residual stream"
    return None


@functools.cache
def _sums_in_fp32() -> bool:
    """True if Megatron's own sum leaves an fp32 stream as wide as it is (from 0.17 on)."""
    x, residual = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    return bias_dropout_add_unfused(True)((x, None), residual, 0.0).dtype == residual.dtype


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


NAMES: Mapping[Half, HalfNames] = {
    "attention": HalfNames(
        "attention",
        "self_attention",
        SelfAttention,
        "input_layernorm",
        "self_attn_bda",
        (TransformerLayer, MoETransformerLayer),
    ),
    "mlp": HalfNames(
        "MLP",
        "mlp",
        MLP,
        "pre_mlp_layernorm",
        "mlp_bda",
        (TransformerLayer, MLPLayer),
    ),
}


def halves_of(layer: Any) -> tuple[Half, ...]:
    """Returns the halves that a layer has: one in HybridModel, none if it is of another kind."""
    if not isinstance(layer, TransformerLayer):
        return ()
    found = []
    for half, names in NAMES.items():
        parts = (getattr(layer, name) for name in (names.module, names.norm, names.bda))
        if not all(isinstance(part, IdentityOp | IdentityFuncOp) for part in parts):
            found.append(half)
    return tuple(found)


def why_not_half(layer: Any, half: Half) -> str | None:
    """Returns the first thing about half a built layer that our kernels do not compute, or None."""
    names = NAMES[half]
    module = getattr(layer, names.module)
    if isinstance(module, BaseMoELayer):
        return "experts"
    for found, kinds in ((layer, names.layers), (module, (names.kind,))):
        if built_class(found) not in kinds:
            return f"a {built_class(found).__name__} is no {kinds[0].__name__}"
    if getattr(layer, f"_{names.norm}_returns_residual", False):
        return f"{names.norm}_returns_residual is True"
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
    return (
        why_not_stream(layer.config, column)
        or _why_not_linear(column, ColumnParallelLinear)
        or _why_not_linear(row, RowParallelLinear)
    )


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


def norm_and_linears(layer: Any, half: Half) -> tuple[Norm | None, Any, Any]:
    """Returns the norm of a half, None if our kernels do not compute it, and its two linears."""
    names = NAMES[half]
    module = getattr(layer, names.module)
    if half == "attention":
        linears = module.linear_qkv, module.linear_proj
    else:
        linears = module.linear_fc1, module.linear_fc2
    before, column = getattr(layer, names.norm), linears[0]
    if not hasattr(column, "layer_norm_weight"):
        return built_norm(before), *linears
    # Transformer Engine's linear begins with the norm.
    is_inside = isinstance(before, IdentityOp) and column.normalization == "RMSNorm"
    return BuiltNorm(column, "layer_norm_weight") if is_inside else None, *linears
