"""The routed experts of a base model: their shape, and where a stored file holds them.

A row meets `top_k` of the experts. The router's scores are a softmax over all experts in fp32, the
`top_k` largest are chosen, and their scores weigh what the chosen experts return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tlora_megatron.model import gpt_oss
from tlora_megatron.model.config_values import count, positive

ExpertPart = Literal["gate_proj", "up_proj", "down_proj"]
EXPERT_PARTS: tuple[ExpertPart, ...] = ("gate_proj", "up_proj", "down_proj")

_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedGlu:
    """The activation of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, both limited before."""

    alpha: float
    limit: float
    """Most of gate, and of up and -up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Routed experts, which every layer has in the place of an MLP."""

    num_experts: int
    top_k: int
    """Experts of a row."""
    ffn_size: int
    """Hidden size of each expert."""
    normalizes: bool
    """The weights of a row's experts are divided by their sum."""
    keeps_fp32: bool = False
    """These weights stay in fp32 (Mixtral); else they are rounded to the logits' dtype."""
    block: str = "mlp"
    """Name of the experts' module in a stored layer."""
    glu: ClampedGlu | None = None
    """gpt-oss: the experts' activation; router and experts have biases then, and the weights are a
    softmax over the logits of a row's own experts. None: SwiGLU without biases."""

    @property
    def stored_router(self) -> str:
        """Name of the router's weight `[num_experts, hidden]` in a stored layer."""
        return f"{self.block}.{'gate' if self.glu is None else 'router'}.weight"

    def stored(self, expert: int, part: ExpertPart) -> str:
        """Name of one expert's weight in a stored layer.

        Files of gpt-oss hold all experts in one tensor; `gpt_oss_experts` reads them by these.
        """
        name = part if self.block == "mlp" else _OF_MIXTRAL[part]
        return f"{self.block}.experts.{expert}.{name}.weight"

    @property
    def stored_router_bias(self) -> str:
        """Name of gpt-oss' bias `[num_experts]` of the router in a stored layer."""
        return f"{self.block}.router.bias"

    def stored_bias(self, expert: int, part: ExpertPart) -> str:
        """Name of one expert's bias, of gpt-oss; see `stored`."""
        return f"{self.block}.experts.{expert}.{part}.bias"

    @property
    def stored_shared_gate(self) -> str:
        """Name of the weight `[1, hidden]` whose sigmoid weighs the shared expert."""
        return f"{self.block}.shared_expert_gate.weight"

    def stored_shared(self, part: ExpertPart) -> str:
        """Name of a weight of the shared expert in a stored layer."""
        return f"{self.block}.shared_expert.{part}.weight"


def refuse_experts(experts: ExpertsSpec | None, what: str) -> None:
    """Refuses a base with experts where only dense ones are known.

    Args:
        what: begins the sentence: "the base of ...".
    """
    if experts is not None:
        raise ValueError(
            f"{what} must have no routed experts yet, got {experts.num_experts} experts; "
            "train its jobs with tlora train"
        )


_QWEN_MOE: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
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
    gpt_oss.MODEL_TYPE: gpt_oss.DEFAULTS,
}
"""Values of missing keys by model type: the defaults of transformers 5.23's config classes."""
_NUM_EXPERTS = {"qwen3_moe": 128, "qwen2_moe": 60, "mixtral": 8, "gpt_oss": 128}


def read_experts(values: dict[str, Any]) -> ExpertsSpec | None:
    """Reads the experts of a `config.json` whose missing keys are filled in; None without any.

    Raises:
        ValueError: for what is not supported; the message lacks the file's name.
    """
    kind = values["model_type"]
    if kind not in DEFAULTS:
        return None
    is_mixtral, is_gpt_oss = kind == "mixtral", kind == gpt_oss.MODEL_TYPE
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
