"""The command-line arguments with which Megatron-LM builds a backbone.

One table of arguments serves the command line and the checkpoint, so that the two cannot differ.
Checked against the argument parsers of core_v0.16.1 to 0.20.0-dev.
"""

from __future__ import annotations

from typing import Any

from tlora_megatron.model.spec import ModelSpec

_VOCABULARY_MULTIPLE = 128
"""Megatron-LM's default of --make-vocab-size-divisible-by. The vocabularies of the supported public
models are multiples of it already, so that no layout up to TP=128 pads them."""

_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants of Megatron-core's `RotaryEmbedding._apply_scaling`: only the factor is an argument."""


_FLAG_NAMES = {"layernorm_epsilon": "norm_epsilon"}
"""Flags that are not called like their argument."""


def megatron_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The architecture by the names of Megatron-LM's arguments; False means that a switch is off.

    Raises:
        NotImplementedError: for what Megatron-LM has no argument for.
    """
    if not spec.rope_theta.is_integer():
        raise NotImplementedError(
            f"rope_theta must be whole for Megatron-LM's --rotary-base, got {spec.rope_theta}"
        )
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "group_query_attention": spec.num_kv_heads != spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "position_embedding_type": "rope",
        "rotary_base": int(spec.rope_theta),
        "rotary_percent": 1.0,
        **_rope_scaling(spec),
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        **_experts(spec),
        "untie_embeddings_and_output_weights": not spec.tied_embeddings,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": spec.vocab_size,
        # Megatron-LM would take the tokenizer's length, which is less than the model's for Qwen.
        "padded_vocab_size": -(-spec.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    """The router as Hugging Face's: a softmax of the chosen logits is the normalised one of all."""
    if spec.experts is None:
        return {}
    shared = (
        {}
        if spec.shared_ffn_size is None
        else {
            "moe_shared_expert_intermediate_size": spec.shared_ffn_size,
            "moe_shared_expert_gate": True,
        }
    )
    return shared | {
        "num_experts": spec.experts.num_experts,
        "moe_router_topk": spec.experts.top_k,
        "moe_ffn_hidden_size": spec.experts.ffn_size,
        "moe_router_pre_softmax": not spec.experts.normalizes,
        "moe_router_load_balancing_type": "none",
    }


def megatron_flags(spec: ModelSpec) -> list[str]:
    """`megatron_arguments` as words of a command line."""
    arguments = megatron_arguments(spec)
    if not arguments["group_query_attention"]:
        del arguments["num_query_groups"]
    words = []
    for name, value in arguments.items():
        if value is not False:
            flag = "--" + _FLAG_NAMES.get(name, name).replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
    return words


def _rope_scaling(spec: ModelSpec) -> dict[str, Any]:
    if spec.rope_scaling is None:
        return {"use_rope_scaling": False}
    for name, expected in _LLAMA3_ROPE.items():
        if spec.rope_scaling[name] != expected:
            raise NotImplementedError(
                f"rope_scaling.{name} must be {expected} for Megatron-LM's --use-rope-scaling, got "
                f"{spec.rope_scaling[name]}"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": spec.rope_scaling["factor"]}
