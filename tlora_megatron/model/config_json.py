"""Reads the shape of a base model from its Hugging Face `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlora_megatron.model import gpt_oss
from tlora_megatron.model.config_values import count, positive
from tlora_megatron.model.spec import GPT_OSS, ClampedGlu, ExpertsSpec, ModelSpec

DENSE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_MODEL_TYPES = (*DENSE_MODEL_TYPES, "qwen2_moe", "qwen3_moe", "mixtral", GPT_OSS)

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
"""Keys without a default: a file that lacks them is incomplete."""

_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN_MOE: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    "mistral": _MISTRAL | {"head_dim": None},
    "qwen2": _QWEN | {"head_dim": None},
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN_MOE
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    "qwen2_moe": _QWEN_MOE
    | {
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
    },
    GPT_OSS: gpt_oss.DEFAULTS,
}
"""Values of missing keys by model type: the defaults of transformers 5.23's config classes."""

_SHARED_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
_NUM_EXPERTS = {"qwen3_moe": 128, "qwen2_moe": 60, "mixtral": 8, "gpt_oss": 128}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")


def read_model_spec(config_json: Path) -> ModelSpec:
    """Reads and checks a Hugging Face `config.json`.

    Raises:
        ValueError: if the file is missing or malformed, or holds an architecture that is not
        supported.
    """
    try:
        raw = json.loads(Path(config_json).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"base_model must hold a config.json, got {config_json}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config_json} must be JSON, got {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{config_json} must hold a JSON object, got {raw!r}")
    try:
        return _parse(_with_defaults(raw))
    except ValueError as error:
        raise ValueError(f"{error} in {config_json}") from None


def _with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ValueError(f"model_type must be one of {supported}, got {model_type!r}")
    for key in _REQUIRED:
        if key not in raw:
            raise ValueError(f"{key} must be set, got only {', '.join(sorted(raw))}")
    return _SHARED_DEFAULTS | _DEFAULTS[model_type] | raw


def _parse(values: dict[str, Any]) -> ModelSpec:
    if values["hidden_act"] != "silu":
        raise ValueError(f"hidden_act must be silu, got {values['hidden_act']!r}")
    if not values.get("is_causal", True):
        raise ValueError(
            f"is_causal must be true (a token sees none behind it), got {values['is_causal']!r}"
        )
    is_gpt_oss = values["model_type"] == GPT_OSS
    for key in ("mlp_bias",) if is_gpt_oss else ("attention_bias", "mlp_bias"):
        if values[key]:
            raise ValueError(f"{key} must be false, got {values[key]!r}")
    layers, hidden, heads, ffn, vocab = (count(values, key) for key in _REQUIRED)
    experts = _read_experts(values)
    kv_heads = count(values, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads={kv_heads}, got {heads}"
        )
    head_dim = count(values, "head_dim", default=hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    rope = _rope(values)
    return ModelSpec(
        model_type=values["model_type"],
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn if experts is None else experts.ffn_size,
        vocab_size=vocab,
        max_positions=count(values, "max_position_embeddings"),
        norm_eps=positive(values, "rms_norm_eps"),
        rope_theta=positive(rope, "rope_theta"),
        rope_scaling=_llama3_scaling(values, rope),
        tied_embeddings=bool(values["tie_word_embeddings"]),
        qkv_bias=_has_qkv_bias(values),
        qk_norm=values["model_type"] in ("qwen3", "qwen3_moe"),
        shared_ffn_size=count(values, "shared_expert_intermediate_size")
        if values["model_type"] == "qwen2_moe"
        else None,
        experts=experts,
        sliding_window=_sliding_window(values, layers),
        gpt_oss=gpt_oss.read_attention(values, rope, layers) if is_gpt_oss else None,
    )


def _has_qkv_bias(values: dict[str, Any]) -> bool:
    """Qwen2 and gpt-oss always have it; Qwen2-MoE says so, and others ignore the key."""
    kind = values["model_type"]
    return kind in ("qwen2", GPT_OSS) or (kind == "qwen2_moe" and bool(values["qkv_bias"]))


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters; transformers 4 wrote `rope_scaling`, and `rope_theta` beside it."""
    is_gpt_oss = values["model_type"] == GPT_OSS
    rope = values.get("rope_scaling") or values.get("rope_parameters")
    rope = rope or (gpt_oss.ROPE_DEFAULTS if is_gpt_oss else {})
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope_parameters must be one set for all layers, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = ("default", "llama3", "yarn") if is_gpt_oss else ("default", "llama3")
    if kind not in kinds:
        *first, last = kinds
        raise ValueError(f"rope_type must be {', '.join(first)} or {last}, got {kind!r}")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor must be 1, got {partial!r}")
    return {"rope_theta": values["rope_theta"]} | rope | {"rope_type": kind}


def _llama3_scaling(values: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any] | None:
    if rope["rope_type"] != "llama3":
        return None
    key = "original_max_position_embeddings"
    places = ({key: values["max_position_embeddings"]}, rope, values)
    # transformers lets the key outside win, and takes max_position_embeddings where it is nowhere.
    original = next(place[key] for place in reversed(places) if key in place)
    scaling = {name: positive(rope, name) for name in _LLAMA3_KEYS}
    return scaling | {key: count({key: original}, key)}


def _sliding_window(values: dict[str, Any], num_layers: int) -> int | None:
    """The sliding window: none in Llama, all layers in Mistral, optional later layers in Qwen.

    In Mixtral and Qwen3-MoE all layers have it or none.
    """
    if values["model_type"] == "mistral" and "layer_types" in values:
        # transformers takes such a file for another architecture, Ministral.
        raise ValueError(
            f"layer_types must be absent from a mistral config, got {values['layer_types']!r}"
        )
    if values.get("sliding_window") is None or values["model_type"] in ("llama", GPT_OSS):
        return None  # gpt-oss runs with its windows
    if values["model_type"] == "qwen3_moe" and not values["use_sliding_window"]:
        return None
    if values["model_type"] in ("qwen2", "qwen3", "qwen2_moe"):
        kinds = values.get("layer_types")
        if kinds is None:
            windowed = count(values, "max_window_layers", least=0)
            if values["model_type"] != "qwen2_moe":
                windowed = num_layers - windowed  # there all but the first ones
            kinds = ["sliding_attention"] * max(0, windowed)
        if not values["use_sliding_window"] or "sliding_attention" not in kinds:
            return None
    return count(values, "sliding_window")


def _read_experts(values: dict[str, Any]) -> ExpertsSpec | None:
    """Reads the experts of a `config.json` whose missing keys are filled in; None without any.

    Raises:
        ValueError: for what is not supported; the message lacks the file's name.
    """
    kind = values["model_type"]
    if kind not in _NUM_EXPERTS:
        return None
    is_mixtral, is_gpt_oss = kind == "mixtral", kind == GPT_OSS
    _check_unsupported(values)
    num_experts = _num_experts(values)
    glu = None
    if is_gpt_oss:
        alpha, limit = (positive(values, f"swiglu_{name}") for name in ("alpha", "limit"))
        glu = ClampedGlu(alpha=alpha, limit=limit)
    top_k = count(values, "num_experts_per_tok")
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok must be at most {num_experts}, got {top_k}")
    ffn = "intermediate_size" if is_mixtral or is_gpt_oss else "moe_intermediate_size"
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        ffn_size=count(values, ffn),
        normalizes=is_mixtral or is_gpt_oss or bool(values["norm_topk_prob"]),
        keeps_fp32=is_mixtral,
        block="block_sparse_moe" if is_mixtral else "mlp",
        glu=glu,
    )


def _check_unsupported(values: dict[str, Any]) -> None:
    """Refuses layers without experts among those with some, and noise on the router's input."""
    for key, usual in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        value = values.get(key, usual)
        if value not in (usual, None):
            why = "a base has experts in every layer or in none"
            raise ValueError(f"{key} must be {usual} ({why}), got {value!r}")
    noise = values.get("router_jitter_noise", 0.0)
    if noise:
        why = "it would move tokens to other experts at random"
        raise ValueError(f"router_jitter_noise must be 0 ({why}), got {noise!r}")


def _num_experts(values: dict[str, Any]) -> int:
    """The number of experts, which transformers 5 writes under another name than 4 did."""
    names = ("num_local_experts", "num_experts")
    given = {name: values[name] for name in names if values.get(name) is not None}
    if len(set(given.values())) > 1:
        raise ValueError(
            "num_local_experts and num_experts must be the same, got "
            f"{given['num_local_experts']!r} and {given['num_experts']!r}"
        )
    name, value = next(iter(given.items()), ("num_experts", _NUM_EXPERTS[values["model_type"]]))
    return count({name: value}, name)
