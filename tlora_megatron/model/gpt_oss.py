"""Reads what gpt-oss has and other bases lack: windows, sinks, biases and YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tlora_megatron.model.config_values import count, positive
from tlora_megatron.model.spec import GptOssAttention, Yarn

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "sliding_window": 128,
    "layer_types": None,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
"""Values of missing keys: the defaults of transformers 5.23's config class."""
ROPE_DEFAULTS: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary parameters of a file that has none."""


def read_attention(
    values: Mapping[str, Any], rope: Mapping[str, Any], num_layers: int
) -> GptOssAttention:
    """Reads windows, biases and rotary scaling of a `config.json` whose missing keys are filled in.

    Args:
        rope: its rotary parameters, with `rope_type`.
    """
    if values["attention_bias"] is not True:
        raise ValueError(f"attention_bias must be true, got {values['attention_bias']!r}")
    if values["attention_dropout"]:
        raise ValueError(
            f"attention_dropout must be 0 in a frozen base, got {values['attention_dropout']!r}"
        )
    yarn = _read_yarn(values, rope) if rope["rope_type"] == "yarn" else None
    return GptOssAttention(windows=_read_windows(values, num_layers), yarn=yarn)


def _read_windows(values: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    kinds = values["layer_types"]
    if kinds is None:
        kinds = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {FULL, SLIDING}:
        raise ValueError(
            f"layer_types must be {FULL} or {SLIDING} for each of {num_layers} layers, got {kinds}"
        )
    window = count(values, "sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _read_yarn(values: Mapping[str, Any], rope: Mapping[str, Any]) -> Yarn:
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key) is not None:
            raise ValueError(f"{key} must be absent from rope_parameters, got {rope[key]!r}")
    key = "original_max_position_embeddings"
    # transformers lets the key outside win.
    original = count(values if key in values else rope, key)
    truncates = rope.get("truncate", True)
    if type(truncates) is not bool:
        raise ValueError(f"truncate must be true or false, got {truncates!r}")
    factor = positive(rope, "factor")
    scales_by = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Yarn(
        factor=factor,
        beta_fast=positive(rope, "beta_fast", default=32.0),
        beta_slow=positive(rope, "beta_slow", default=1.0),
        original_positions=original,
        truncates=truncates,
        attention_factor=positive(rope, "attention_factor", default=scales_by),
    )
