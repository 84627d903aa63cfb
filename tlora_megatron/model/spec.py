"""The shape of a frozen base model: its sizes, its linears, its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tlora_megatron.config.job import EXPERT_TARGETS, HF_TARGETS, SHARED_EXPERT_TARGETS

GPT_OSS = "gpt_oss"
"""Its `model_type`."""
ExpertPart = Literal["gate_proj", "up_proj", "down_proj"]
EXPERT_PARTS: tuple[ExpertPart, ...] = ("gate_proj", "up_proj", "down_proj")
_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

LINEAR_TARGETS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "linear_qkv"),
    "linear_proj": ("o_proj", "linear_proj"),
    "linear_fc1": ("gate_proj", "up_proj", "linear_fc1"),
    "linear_fc2": ("down_proj", "linear_fc2"),
}
"""Targets that live on each Megatron linear of a dense layer."""
SHARED_EXPERT_LINEARS: dict[str, tuple[str, ...]] = {
    "shared_fc1": ("shared_expert.gate_proj", "shared_expert.up_proj"),
    "shared_fc2": ("shared_expert.down_proj",),
}
"""Targets that live on the linears of a shared expert, in models that have one."""
EXPERT_LINEARS: dict[str, tuple[str, ...]] = {
    "experts_fc1": ("experts.gate_proj", "experts.up_proj", "experts.linear_fc1"),
    "experts_fc2": ("experts.down_proj", "experts.linear_fc2"),
}
"""Targets that live on the linears of routed experts; each expert has its own factors."""
ALL_LINEARS = LINEAR_TARGETS | SHARED_EXPERT_LINEARS
"""Those of dense linears, whose rows are the micro-batch's."""
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1", "shared_fc1", "experts_fc1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedGlu:
    """The activation of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, both limited before."""

    alpha: float
    limit: float
    """Most of gate, and of up and -up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Routed experts, which every layer has in the place of an MLP.

    A row meets `top_k` of them. The router's scores are a softmax over all experts in fp32, the
    `top_k` largest are chosen, and their scores weigh what the chosen experts return.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN's scaling of rotary frequencies (arXiv 2309.00071)."""

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
    """Attention of a gpt-oss base, beside what all bases have.

    Every layer has a sink: a learned logit per head that takes its share of each softmax and adds
    nothing. All attention linears have biases.
    """

    windows: tuple[int | None, ...]
    """Of each layer: tokens that a query sees, its own included; None = all earlier ones."""
    yarn: Yarn | None


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
        block = "self_attn" if target in _ATTENTION else "mlp"
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


def refuse_gpt_oss(model_type: str, what: str) -> None:
    """Refuses a gpt-oss base where only `tlora train` computes it.

    Args:
        what: begins the sentence: "the base of ...".
    """
    if model_type == GPT_OSS:
        raise ValueError(
            f"{what} must not be of model_type {GPT_OSS} yet, got one; "
            "train its jobs with tlora train"
        )
