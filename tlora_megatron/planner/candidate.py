"""One way to run the super-model: what the planner chooses among."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from tlora_megatron.model.layout import LoraSharding, ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.workload import JobLoad

Recompute = Literal["none", "selective", "full"]
Runner = Literal["train", "megatron", "deepspeed"]
"""`tlora train`, a Megatron-LM script with `--tlora-config`, a DeepSpeed JSON with `tlora`."""
SHARDINGS: tuple[LoraSharding, ...] = get_args(LoraSharding)
"""The one that exchanges least first."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Layout, micro-batch budget and memory savings of one super-model."""

    tp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    """Model chunks of a pipeline stage; 1 = not interleaved."""
    cp_size: int = 1
    dp_size: int = 1
    sequence_parallel: bool = False
    micro_batch_tokens: int = 8192
    """Rows of a packed micro-batch, over its context-parallel ranks."""
    recompute: Recompute = "none"
    num_nano_batches: int = 1
    """That the model finds fastest: a run chooses its own (`run.nano_batches: auto`)."""
    lora_sharding: LoraSharding = "fold"
    """Of standard adapters."""

    @property
    def num_gpus(self) -> int:
        """GPUs the plan uses."""
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size

    @property
    def layout(self) -> ParallelLayout:
        """As the run lays its processes out; virtual stages are not part of it."""
        return ParallelLayout(
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            cp_size=self.cp_size,
            dp_size=self.dp_size,
            sequence_parallel=self.sequence_parallel,
            lora_sharding=self.lora_sharding,
        )

    @property
    def runs_in(self) -> tuple[Runner, ...]:
        """What can run it.

        Only Megatron-LM's scripts have virtual stages; DeepSpeed's engine has tensor and data
        parallelism without sequence parallelism, nano-batches or shardings but fold, and
        recomputes all or nothing.
        """
        if self.vpp_size > 1:
            return ("megatron",)
        plain = self.pp_size == self.cp_size == self.num_nano_batches == 1
        plain = plain and self.lora_sharding == "fold"
        if plain and not self.sequence_parallel and self.recompute != "selective":
            return ("train", "megatron", "deepspeed")
        return ("train", "megatron")

    @property
    def label(self) -> str:
        """Short form, for example `TP2+SP PP1 DP4, 8192 tokens, selective`."""
        sizes = [f"TP{self.tp_size}" + ("+SP" if self.sequence_parallel else "")]
        sizes.append(f"PP{self.pp_size}" + (f"x{self.vpp_size}" if self.vpp_size > 1 else ""))
        sizes += [f"CP{self.cp_size}"] if self.cp_size > 1 else []
        sizes.append(f"DP{self.dp_size}")
        parts = [" ".join(sizes), f"{self.micro_batch_tokens} tokens"]
        if self.lora_sharding != "fold":
            parts.append(self.lora_sharding)
        if self.num_nano_batches > 1:
            parts.append(f"{self.num_nano_batches} nano-batches")
        return ", ".join([*parts, f"recompute {self.recompute}"])


def misfit(spec: ModelSpec, plan: Plan) -> str | None:
    """Why a model cannot be cut as a plan says; None if it can."""
    for name, size in (
        ("num_heads", spec.num_heads),
        ("num_kv_heads", spec.num_kv_heads),
        ("ffn_size", spec.ffn_size),
    ):
        if size % plan.tp_size:
            return f"{name} {size} is no multiple of TP {plan.tp_size}"
    if spec.num_layers % plan.pp_size:
        return f"num_layers {spec.num_layers} is no multiple of PP {plan.pp_size}"
    if plan.vpp_size > 1 and plan.pp_size == 1:
        return "virtual stages need a pipeline"
    if spec.num_layers // plan.pp_size % plan.vpp_size:
        layers = spec.num_layers // plan.pp_size
        return f"{layers} layers a stage are no multiple of VPP {plan.vpp_size}"
    if plan.lora_sharding != "fold" and plan.tp_size == 1:
        return f"{plan.lora_sharding} needs tensor parallelism"
    if plan.sequence_parallel and plan.tp_size == 1:
        return "sequence parallelism needs tensor parallelism"
    multiple = chunk_multiple(plan)
    if plan.micro_batch_tokens % multiple:
        return f"{plan.micro_batch_tokens} tokens are no multiple of {multiple} ranks' chunks"
    return None


def job_misfit(jobs: Iterable[JobLoad], plan: Plan) -> str | None:
    """Why jobs cannot run under a plan; None if they can."""
    for job in jobs:
        if job.num_blocks > 1 and job.num_blocks % plan.tp_size:
            blocks = f"num_blocks {job.num_blocks} of job {job.name}"
            return f"{blocks} is no multiple of TP {plan.tp_size}"
    return None


def chunk_multiple(plan: Plan) -> int:
    """What the rows of a micro-batch must be a multiple of; every CP rank has two chunks."""
    return plan.tp_size * plan.cp_size * (2 if plan.cp_size > 1 else 1)
