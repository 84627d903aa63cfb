"""The frozen backbone's shape, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    """None, or Hugging Face's llama3 scaling: factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim of every query and key head (Qwen3)."""

    @property
    def q_size(self) -> int:
        """Rows of q_proj."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.num_kv_heads * self.head_dim

    def target_shape(self, target: str) -> tuple[int, int]:
        """`(out, in)` of a target module's whole weight; fused rows: q, k, v or gate, up."""
        hidden, ffn = self.hidden_size, self.ffn_size
        return {
            "q_proj": (self.q_size, hidden),
            "k_proj": (self.kv_size, hidden),
            "v_proj": (self.kv_size, hidden),
            "o_proj": (hidden, self.q_size),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
            "linear_qkv": (self.q_size + 2 * self.kv_size, hidden),
            "linear_proj": (hidden, self.q_size),
            "linear_fc1": (2 * ffn, hidden),
            "linear_fc2": (hidden, ffn),
        }[target]


def read_model_spec(config_json: Path) -> ModelSpec:
    """Reads and checks a Hugging Face `config.json`.

    Raises:
        ValueError: if the file is missing or malformed, or holds an architecture that is not
        supported.
    """
    try:
        raw = json.loads(Path(config_json).read_text())
    except FileNotFoundError as error:
        raise ValueError(f"base_model must hold a config.json, got {config_json}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config_json} must be JSON, got {error}") from error
    _refuse_unsupported(raw, config_json)
    try:
        return _parse(raw)
    except KeyError as error:
        raise ValueError(
            f"{config_json} must hold the key {error.args[0]!r}, got {sorted(raw)}"
        ) from error


def _parse(raw: dict[str, Any]) -> ModelSpec:
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return ModelSpec(
        model_type=raw["model_type"],
        num_layers=raw["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        ffn_size=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_positions=raw.get("max_position_embeddings", 2048),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=dict(rope) if kind == "llama3" else None,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=raw["model_type"] == "qwen2",
        qk_norm=raw["model_type"] == "qwen3",
    )


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model_type must be one of {', '.join(SUPPORTED_MODEL_TYPES)}, "
            f"got {model_type!r} in {path}"
        )
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type must be default or llama3, got {kind!r} in {path}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be silu, got {raw['hidden_act']!r} in {path}")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ValueError(f"{key} must be false, got {raw[key]!r} in {path}")
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", model_type == "mistral"):
        raise ValueError(f"sliding_window must be null, got {window} in {path}")
