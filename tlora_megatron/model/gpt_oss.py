"""Parts of gpt-oss that other bases lack, as its `config.json` states them.

Attention has a window in some layers and a sink in all of them: a learned logit per head that takes
its share of each softmax and adds nothing. Positions may be scaled by YaRN (arXiv 2309.00071). All
attention linears have biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlora_megatron.model.config_values import count, positive

MODEL_TYPE = "gpt_oss"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN's scaling of rotary frequencies."""

    factor: float
    """Divides low frequencies."""
    beta_fast: float
    """Rotations over the original positions from which a frequency stays."""
    beta_slow: float
    """Rotations below which it is divided whole."""
    original_positions: int
    truncates: bool
    """The bounds between the two are rounded to whole dimensions."""
    attention_factor: float
    """Of cosine and sine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssAttention:
    """Attention of a gpt-oss base, beside what all bases have."""

    windows: tuple[int | None, ...]
    """Of each layer: tokens that a query sees, its own included; None = all earlier ones."""
    yarn: Yarn | None


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


def refuse_gpt_oss(model_type: str, what: str) -> None:
    """Refuses a gpt-oss base where only `tlora train` computes it.

    Args:
        what: begins the sentence: "the base of ...".
    """
    if model_type == MODEL_TYPE:
        raise ValueError(
            f"{what} must not be of model_type {MODEL_TYPE} yet, got one; "
            "train its jobs with tlora train"
        )
