"""Settings of Megatron's under which layers and heads that it built compute what our kernels do.

One table: a field of TransformerConfig, the values that the kernels compute, and why others stay
with the modules. A field that a version lacks has its first value there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F

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
            return f"{field} is {_show(value)}: {why}"
    return None


def _show(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
