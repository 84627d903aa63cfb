"""The frozen backbone's shape, read from a Hugging Face `config.json`, and its parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.config.job import EXPERT_TARGETS, HF_TARGETS, SHARED_EXPERT_TARGETS
from tlora_megatron.model.config_values import count, positive
from tlora_megatron.model.experts import DEFAULTS as _EXPERT_DEFAULTS
from tlora_megatron.model.experts import ExpertsSpec, read_experts
from tlora_megatron.model.gpt_oss import MODEL_TYPE, ROPE_DEFAULTS, GptOssAttention, read_attention

DENSE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_MODEL_TYPES = (*DENSE_MODEL_TYPES, "qwen2_moe", "qwen3_moe", "mixtral", MODEL_TYPE)

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
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    "mistral": _MISTRAL | {"head_dim": None},
    "qwen2": _QWEN | {"head_dim": None},
    "qwen3": _QWEN | {"head_dim": 128},
    **_EXPERT_DEFAULTS,
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
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Shape of a decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Hidden size of the MLP, or of each routed expert."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    """Hugging Face's llama3 scaling, with factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings; None: no scaling."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    """True if every query and key head is normalised over head_dim by an RMSNorm (Qwen3)."""
    shared_ffn_size: int | None = None
    """Hidden size of the shared expert that every layer has; None: there is none."""
    experts: ExpertsSpec | None = None
    """Routed experts that every layer has in the place of an MLP; None: there are none."""
    sliding_window: int | None = None
    """Tokens that a query sees in some or all layers, its own included; None: all earlier ones.
    The base runs without a window, so only sequences that fit into the window may be trained."""
    gpt_oss: GptOssAttention | None = None
    """Windows, sinks, biases of all linears and YaRN, of a gpt-oss base alone."""
    fp8_linears: tuple[tuple[str, int], ...] = ()
    """Megatron's linears whose frozen weights are FP8 codes in this run, each with the number of
    layers in which they are."""
    fp8_in_blocks: bool = False
    """True if these codes have scales of blocks of 128 x 128, which no rank's part may cut."""

    @property
    def q_size(self) -> int:
        """Output features of q_proj."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Output features of k_proj, and of v_proj."""
        return self.num_kv_heads * self.head_dim

    @property
    def row_weights(self) -> int:
        """Elements of a layer's weight matrices that one row meets, summed over its linears."""
        return self._matrices(1 if self.experts is None else self.experts.top_k)

    @property
    def layer_weights(self) -> int:
        """Elements of all weight matrices of a layer."""
        return self._matrices(1 if self.experts is None else self.experts.num_experts)

    def _matrices(self, num_mlps: int) -> int:
        attention = 2 * (self.q_size + self.kv_size) * self.hidden_size
        router = 0 if self.experts is None else self.experts.num_experts
        inner = num_mlps * self.ffn_size
        if self.shared_ffn_size is not None:
            router, inner = router + 1, inner + self.shared_ffn_size
        return attention + (router + 3 * inner) * self.hidden_size

    def fp8_share(self, linear: str) -> float:
        """Share of the layers in which a Megatron linear's frozen weight is FP8 codes."""
        return dict(self.fp8_linears).get(linear, 0) / self.num_layers

    def target_shape(self, target: str) -> tuple[int, int]:
        """`(out, in)` of a target's whole weight; fused rows are in the order q, k, v or gate, up.

        Of a target on routed experts it is one expert's.

        Raises:
            ValueError: if the target is in experts and the model has none, or the other way round.
        """
        hidden, ffn = self.hidden_size, self.ffn_size
        if self.experts is not None and target in _MLP:
            raise ValueError(
                f"lora.target_modules must be among {', '.join(self.peft_targets)} over a base "
                f"with routed experts, got {target}"
            )
        if target.startswith("experts"):
            if self.experts is None:
                raise ValueError(
                    f"target {target} must be in the model, which has no routed experts"
                )
            target = target.replace("experts_fc", "experts.linear_fc").removeprefix("experts.")
        if target.startswith("shared_"):
            if self.shared_ffn_size is None:
                raise ValueError(
                    f"target {target} must be in the model, which has no shared expert"
                )
            target, ffn = _SHARED[target], self.shared_ffn_size
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

    def module_path(self, layer: int, target: str) -> str:
        """Module name of a target in the transformers model: `model.layers.0.mlp.up_proj`."""
        attention = ("q_proj", "k_proj", "v_proj", "o_proj")
        block = "self_attn" if target in attention else "mlp"
        return f"model.layers.{layer}.{block}.{target}"

    @property
    def peft_targets(self) -> tuple[str, ...]:
        """Targets that PEFT can name in this model, in its order."""
        shared = SHARED_EXPERT_TARGETS if self.shared_ffn_size is not None else ()
        if self.gpt_oss is not None:
            return _ATTENTION
        dense = HF_TARGETS if self.experts is None else _ATTENTION + EXPERT_TARGETS
        return dense + shared


_MLP = ("gate_proj", "up_proj", "down_proj", "linear_fc1", "linear_fc2")
_ATTENTION = tuple(target for target in HF_TARGETS if target not in _MLP)
_SHARED = {
    "shared_fc1": "linear_fc1",
    "shared_fc2": "linear_fc2",
    **{target: target.partition(".")[2] for target in SHARED_EXPERT_TARGETS},
}
"""Maps a shared expert's linear or target to that of a dense MLP."""


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
    is_gpt_oss = values["model_type"] == MODEL_TYPE
    for key in ("mlp_bias",) if is_gpt_oss else ("attention_bias", "mlp_bias"):
        if values[key]:
            raise ValueError(f"{key} must be false, got {values[key]!r}")
    layers, hidden, heads, ffn, vocab = (count(values, key) for key in _REQUIRED)
    experts = read_experts(values)
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
        gpt_oss=read_attention(values, rope, layers) if is_gpt_oss else None,
    )


def _has_qkv_bias(values: dict[str, Any]) -> bool:
    """Qwen2 and gpt-oss always have it; Qwen2-MoE says so, and others ignore the key."""
    kind = values["model_type"]
    return kind in ("qwen2", MODEL_TYPE) or (kind == "qwen2_moe" and bool(values["qkv_bias"]))


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters; transformers 4 wrote `rope_scaling`, and `rope_theta` beside it."""
    is_gpt_oss = values["model_type"] == MODEL_TYPE
    rope = values.get("rope_scaling") or values.get("rope_parameters")
    rope = rope or (ROPE_DEFAULTS if is_gpt_oss else {})
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
    if values.get("sliding_window") is None or values["model_type"] in ("llama", MODEL_TYPE):
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


class Parameters(NamedTuple):
    """Parameters of a base model, embedding and output layer included."""

    total: int
    active: int
    """Those that one row meets; all of them without routed experts."""


def count_parameters(spec: ModelSpec) -> Parameters:
    """Counts a base model's parameters."""
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    biases = spec.q_size + 2 * spec.kv_size if spec.qkv_bias else 0
    if spec.gpt_oss is not None:
        biases += spec.hidden_size + spec.num_heads  # of the output, and the sinks
    tables = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    ends = tables + spec.hidden_size
    total, active = (
        ends + spec.num_layers * (weights + norms + biases + _expert_biases(spec, is_active))
        for weights, is_active in ((spec.layer_weights, False), (spec.row_weights, True))
    )
    return Parameters(total, active)


def _expert_biases(spec: ModelSpec, is_active: bool) -> int:
    """Those of a layer's router and experts, or of the experts that one row meets."""
    experts = spec.experts
    if experts is None or experts.glu is None:
        return 0
    count = experts.top_k if is_active else experts.num_experts
    return experts.num_experts + count * (2 * spec.ffn_size + spec.hidden_size)
