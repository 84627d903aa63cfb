"""What a user asks of one LoRA job: data, adapter, batch, optimizer, schedule, end.

Every default of a job stands here and nowhere else. `config.py` reads these classes from YAML or
JSON and checks the rules named in each field's metadata.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

HF_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Hugging Face names: each has factors of its own, even where Megatron fuses the base weight."""

SHARED_EXPERT_TARGETS = (
    "shared_expert.gate_proj",
    "shared_expert.up_proj",
    "shared_expert.down_proj",
)
"""The expert that every token goes through, in models of Megatron-LM that have one."""

MEGATRON_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron names: one A for the whole fused linear (Megatron-Bridge's plain LoRA)."""

ROW_PARALLEL_TARGETS = (
    "o_proj",
    "down_proj",
    "shared_expert.down_proj",
    "linear_proj",
    "linear_fc2",
)
"""Targets that tensor parallelism cuts by input features; it cuts all others by outputs."""


def rule(doc: str, *, default: Any = ..., **limits: Any) -> Any:
    """A dataclass field with its description and limits (`ge`, `gt`, `le`, `lt`, `nonempty`)."""
    metadata = {"doc": doc, **limits}
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Where a job's sequences come from: JSON lines of prompt/completion, messages or text."""

    train: str = rule("JSONL file, relative to the config file", nonempty=True)
    eval: str | None = rule("JSONL file for evaluation; None = no evaluation", default=None)
    overlong: Literal["truncate", "error"] = rule(
        "what to do with a sequence over max_seq_len: cut its end and count it, or refuse the job",
        default="truncate",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """The adapter: `y = W x + scaling * B A drop(x)`."""

    rank: int = rule("rank of A `[rank, in]` and B `[out, rank]`", default=16, ge=1)
    alpha: float = rule(
        "scaling = alpha / rank, or alpha / sqrt(rank) with use_rslora", default=32.0, gt=0
    )
    dropout: float = rule(
        "probability of zeroing an input element of the branch", default=0.0, ge=0, lt=1
    )
    target_modules: tuple[str, ...] = rule(
        "Hugging Face names (q_proj ...) or Megatron names (linear_qkv ...); under DeepSpeed the "
        "last part of any linear's module name",
        default=HF_TARGETS,
        nonempty=True,
    )
    use_rslora: bool = rule("rank-stabilised scaling (arXiv 2312.03732)", default=False)
    parametrization: Literal["standard", "block_diagonal"] = rule(
        "block_diagonal: B of column-parallel and A of row-parallel targets consist of num_blocks "
        "diagonal blocks (arXiv 2510.23346), so that tensor parallelism replicates nothing",
        default="standard",
    )
    num_blocks: int = rule(
        "diagonal blocks; a multiple of tp_size and a divisor of rank; 1 = standard",
        default=1,
        ge=1,
    )

    @property
    def scaling(self) -> float:
        """Factor on the branch, fp32."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def is_block_diagonal(self) -> bool:
        """Whether one factor of every target is block-diagonal."""
        return self.parametrization == "block_diagonal"

    def block_factor(self, target: str) -> Literal["lora_a", "lora_b"] | None:
        """The factor of a target that is block-diagonal; None with a standard adapter."""
        if not self.is_block_diagonal:
            return None
        return "lora_a" if target in ROW_PARALLEL_TARGETS else "lora_b"

    def local_rank(self, tp_size: int) -> int:
        """Rank of the adapter as one TP rank computes it: block-diagonal ones are cut by rank."""
        return self.rank // tp_size if self.is_block_diagonal else self.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """AdamW with the semantics of `torch.optim.AdamW` after `clip_grad_norm_`."""

    name: Literal["adamw"] = rule("update rule", default="adamw")
    lr: float = rule("peak learning rate", default=2e-4, gt=0)
    betas: tuple[float, float] = rule("decay of the two moments", default=(0.9, 0.999), ge=0, lt=1)
    eps: float = rule("added to the root of the second moment", default=1e-8, gt=0)
    weight_decay: float = rule("decoupled weight decay", default=0.0, ge=0)
    max_grad_norm: float = rule(
        "clip to this 2-norm over the whole adapter; 0 = no clipping", default=1.0, ge=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec:
    """Learning rate over a job's own steps: linear warm-up, then decay to min_lr at the end."""

    name: Literal["constant", "linear", "cosine"] = rule("shape after warm-up", default="constant")
    warmup_steps: int = rule("steps of linear warm-up from 0", default=0, ge=0)
    min_lr: float = rule("learning rate at the end of the decay", default=0.0, ge=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One LoRA job. Exactly one of `max_steps` and `epochs` is set."""

    name: str = rule(
        "unique; letters, digits, '.', '_', '-'; names the job's output folder", nonempty=True
    )
    data: DataSpec
    lora: LoraSpec = LoraSpec()
    batch_size: int = rule(
        "sequences per optimizer step of this job, over all DP ranks", default=8, ge=1
    )
    max_seq_len: int = rule("longest sequence in tokens", default=1024, ge=2)
    max_steps: int | None = rule("optimizer steps", default=None, ge=1)
    epochs: int | None = rule("passes over the training data", default=None, ge=1)
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    eval_every_steps: int | None = rule(
        "evaluate every so many steps; None = only before and after", default=None, ge=1
    )
    init_from: str | None = rule("PEFT adapter directory to continue from", default=None)
    resume_from: str | None = rule(
        "checkpoint or jobs/NAME folder of another run to continue from, optimizer and all",
        default=None,
    )
    on_nonfinite: Literal["skip", "fail"] = rule(
        "a NaN or inf in this job's loss or gradient: skip that update, or end the job",
        default="skip",
    )
    seed: int = rule("of the adapter's initial values, data order and dropout", default=0, ge=0)
