"""The settings of one LoRA job: data, adapter, batch, optimizer, schedule, end.

Every default of a job is defined here and nowhere else. `config/reader.py` reads these classes from
YAML or JSON and checks the limits in each field's metadata. The descriptions become
docs/configuration.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

HF_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Hugging Face's names; each target has its own factors, even if Megatron fuses the weights."""

SHARED_EXPERT_TARGETS = (
    "shared_expert.gate_proj",
    "shared_expert.up_proj",
    "shared_expert.down_proj",
)
"""Linears of the shared expert, in models of Megatron-LM that have one."""

EXPERT_TARGETS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
"""Linears of routed experts; over a base that has them, names without the prefix mean these."""

FUSED_EXPERT_TARGETS = ("experts.linear_fc1", "experts.linear_fc2")
"""The same by Megatron's names; gate and up of an expert then share one A."""

_ON_EXPERTS = EXPERT_TARGETS + FUSED_EXPERT_TARGETS
_OUTPUTS_OF_EXPERTS = (EXPERT_TARGETS[-1], FUSED_EXPERT_TARGETS[-1])

MEGATRON_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names; one A for the whole fused linear (Megatron-Bridge's plain LoRA)."""

ROW_PARALLEL_TARGETS = (
    "o_proj",
    "down_proj",
    "shared_expert.down_proj",
    "linear_proj",
    "linear_fc2",
)
"""Targets whose input features tensor parallelism splits; all others are split by outputs."""


def rule(doc: str, *, default: Any = ..., **limits: Any) -> Any:
    """A dataclass field with its description and limits (`ge`, `gt`, `le`, `lt`, `nonempty`)."""
    metadata = {"doc": doc, **limits}
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """The data of a job: rows of chats, prompt/completion or text."""

    train: str | tuple[str, ...] = rule(
        "file with the training data, or a list of files, relative to the configuration file",
        nonempty=True,
    )
    eval: str | tuple[str, ...] | None = rule(
        "the same of the evaluation data; null: no evaluation", default=None, nonempty=True
    )
    chat_template: str | None = rule(
        "Jinja file that writes chats, or the name of one of configs/chat_templates; null: the "
        "base's, by which sampling writes them",
        default=None,
        nonempty=True,
    )
    learn: Literal["all", "last", "each"] = rule(
        "a chat's answers that are learnt: all at once, the last one, or each in a sequence that "
        "ends with it",
        default="all",
    )
    overlong: Literal["truncate", "error", "split"] = rule(
        "sequences longer than max_seq_len: cut and count them, refuse the job, or split text",
        default="truncate",
    )

    @property
    def files(self) -> tuple[str, ...]:
        """All files, those for training first."""
        return files_in(self.train) + files_in(self.eval)


def files_in(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The files that `data.train` or `data.eval` names."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """The adapter: `y = W x + scaling * B A drop(x)`."""

    rank: int = rule("rank of the adapter: A is `[rank, in]`, B is `[out, rank]`", default=16, ge=1)
    alpha: float = rule(
        "the adapter's output is scaled by alpha / rank, or alpha / sqrt(rank) with use_rslora",
        default=32.0,
        gt=0,
    )
    dropout: float = rule(
        "probability with which an element of the adapter's input is set to zero",
        default=0.0,
        ge=0,
        lt=1,
    )
    target_modules: tuple[str, ...] = rule(
        "linears that get an adapter, by Hugging Face's names (q_proj, ...) or Megatron's "
        "(linear_qkv, ...); with DeepSpeed, the last part of any linear's module name",
        default=HF_TARGETS,
        nonempty=True,
    )
    expert_rank: int | None = rule(
        "rank of the adapters on routed experts. null: `rank`",
        default=None,
        ge=1,
    )
    expert_sharing: Literal["none", "outer"] = rule(
        "outer: all routed experts of a layer share A of gate_proj and up_proj (or of linear_fc1) "
        "and B of down_proj, as vLLM and SGLang serve them",
        default="none",
    )
    use_rslora: bool = rule(
        "scale by alpha / sqrt(rank): rank-stabilised LoRA (arXiv 2312.03732)", default=False
    )
    parametrization: Literal["standard", "block_diagonal"] = rule(
        "block_diagonal: B of column-parallel and A of row-parallel targets consist of num_blocks "
        "diagonal blocks, so that tensor parallelism replicates nothing (see block_diagonal.md)",
        default="standard",
    )
    num_blocks: int = rule(
        "number of diagonal blocks: a multiple of tp_size and a divisor of rank; 1 with standard",
        default=1,
        ge=1,
    )

    @property
    def scaling(self) -> float:
        """Factor on the adapter's output, in fp32."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def expert_targets(self) -> tuple[str, ...]:
        """The targets on routed experts."""
        return tuple(target for target in self.target_modules if target in _ON_EXPERTS)

    @property
    def shares_outer(self) -> bool:
        """True if the factors on the hidden side of routed experts are one for all of them."""
        return self.expert_sharing == "outer" and bool(self.expert_targets)

    def is_shared(self, target: str, which: str) -> bool:
        """True if all experts of a layer share the factor `lora_a` or `lora_b` of a target."""
        inner = "lora_a" if target in _OUTPUTS_OF_EXPERTS else "lora_b"
        return self.shares_outer and target in _ON_EXPERTS and which != inner

    def rank_of(self, target: str) -> int:
        """Rank of the adapter on a target."""
        return self.expert_rank or self.rank if target in _ON_EXPERTS else self.rank

    @property
    def is_block_diagonal(self) -> bool:
        """True if one factor of every target is block-diagonal."""
        return self.parametrization == "block_diagonal"

    def block_factor(self, target: str) -> Literal["lora_a", "lora_b"] | None:
        """The block-diagonal factor of a target; None for a standard adapter."""
        if not self.is_block_diagonal:
            return None
        return "lora_a" if target in ROW_PARALLEL_TARGETS else "lora_b"

    def local_rank(self, tp_size: int) -> int:
        """Adapter rank that one TP rank computes; a block-diagonal adapter is split by rank."""
        return self.rank // tp_size if self.is_block_diagonal else self.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """AdamW with the semantics of `torch.optim.AdamW` after `clip_grad_norm_`."""

    name: Literal["adamw"] = rule("the optimizer", default="adamw")
    lr: float = rule("peak learning rate", default=2e-4, gt=0)
    betas: tuple[float, float] = rule(
        "decay rates of the two moments", default=(0.9, 0.999), ge=0, lt=1
    )
    eps: float = rule("added to the square root of the second moment", default=1e-8, gt=0)
    weight_decay: float = rule("decoupled weight decay", default=0.0, ge=0)
    max_grad_norm: float = rule(
        "largest 2-norm of the whole adapter's gradient; larger ones are clipped; 0: no clipping",
        default=1.0,
        ge=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec:
    """Learning rate over a job's own steps: linear warm-up, then decay to min_lr at the end."""

    name: Literal["constant", "linear", "cosine"] = rule(
        "shape of the learning rate after warm-up", default="constant"
    )
    warmup_steps: int = rule(
        "optimizer steps of linear warm-up from 0, fewer than the job's", default=0, ge=0
    )
    warmup_ratio: float = rule(
        "warm-up as a share of the job's steps, rounded up, in the place of warmup_steps",
        default=0.0,
        ge=0,
        lt=1,
    )
    min_lr: float = rule("learning rate at the end of the decay", default=0.0, ge=0)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Steps of warm-up of a job of `num_steps`."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceSpec:
    """The loss of a job whose data are pairs of answers (`ops.frozen.pair_losses`)."""

    loss: Literal["dpo", "orpo", "simpo"] = rule(
        "dpo compares with the job as it starts; orpo and simpo need no reference",
        default="dpo",
    )
    beta: float = rule("scale of rewards; of orpo the odds ratio's weight", default=0.1, gt=0)
    label_smoothing: float = rule("share of pairs taken to be mixed up", default=0.0, ge=0, lt=0.5)
    margin: float = rule(
        "of simpo: between the two rewards",
        default=0.5,
        ge=0,
    )
    sft_weight: float | None = rule(
        "weight of the chosen answers' mean cross entropy. null: 1 with orpo, else 0",
        default=None,
        ge=0,
    )

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with log-probabilities of the job as it starts."""
        return self.loss == "dpo"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSpec:
    """What a job asks of a service that runs many on one cluster; `tlora train` ignores it."""

    gpus: int = rule(
        "GPUs that the job would hold if it trained alone; max_slowdown is measured by its speed "
        "on them",
        default=1,
        ge=1,
    )
    max_slowdown: float = rule(
        "how many times slower the job may be than alone, and how much later it may end",
        default=1.5,
        ge=1,
    )
    priority: int = rule("jobs of higher priority go first", default=0)
    checkpoint_every_s: float | None = rule(
        "seconds between two checkpoints of the job, of which a death of its GPU costs it at most "
        "one; null: tlora serve --checkpoint-every",
        default=None,
        gt=0,
    )
    keep_days: float | None = rule(
        "days after the job's end when it is removed with all its files; never later than tlora "
        "serve --keep-finished says; null: by that alone",
        default=None,
        ge=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One LoRA job. Exactly one of `max_steps` and `epochs` is set, unless a client drives it."""

    name: str = rule(
        "unique name, also of the job's output folder; letters, digits, '.', '_' and '-'",
        nonempty=True,
    )
    data: DataSpec
    lora: LoraSpec = LoraSpec()
    batch_size: int = rule(
        "sequences per optimizer step of this job, over all data-parallel ranks", default=8, ge=1
    )
    max_seq_len: int = rule("most tokens of a sequence", default=1024, ge=2)
    portion_tokens: int | None = rule(
        "split each batch into portions of at most this many tokens per data-parallel rank, by "
        "the job's own sequences only: the job's bits are then the same beside any jobs, except "
        "with context parallelism, or sequence parallelism without s_lora. null: "
        "run.portion_tokens; without either, jobs share micro-batches fairly",
        default=None,
        ge=1,
    )
    max_steps: int | None = rule("optimizer steps to train for", default=None, ge=1)
    epochs: int | None = rule("passes over the training data to train for", default=None, ge=1)
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    eval_every_steps: int | None = rule(
        "optimizer steps between evaluations; null: evaluate only before and after training",
        default=None,
        ge=1,
    )
    init_from: str | None = rule(
        "directory of a PEFT adapter to start from, with a new optimizer; its rank, scaling and "
        "target_modules must be the job's",
        default=None,
    )
    resume_from: str | None = rule(
        "checkpoint, or jobs/NAME folder of another run, to continue from with its optimizer state",
        default=None,
    )
    on_nonfinite: Literal["skip", "fail"] = rule(
        "after a NaN or inf in this job's loss or gradient: skip that update, or fail the job",
        default="skip",
    )
    seed: int = rule(
        "seed of the adapter's initial values, the order of its data, and dropout", default=0, ge=0
    )
    preference: PreferenceSpec | None = rule(
        "makes the data pairs, which batch_size counts; max_seq_len is that of each side",
        default=None,
    )
    driven: bool = rule(
        "a client of `tlora serve` sends its batches and asks for its steps (see tinker.md): no "
        "data, steps, optimizer or schedule of its own",
        default=False,
    )
    service: ServiceSpec = ServiceSpec()

    @property
    def num_sides(self) -> int:
        """Sequences of one example: two of a pair."""
        return 1 if self.preference is None else 2
