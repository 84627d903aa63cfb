"""The section `run` of a configuration: settings for all jobs together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlora_megatron.config.job import rule


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Settings of a run, for all its jobs together."""

    output_dir: str = rule(
        "directory for the run's files, relative to the working directory", nonempty=True
    )
    micro_batch_tokens: int = rule(
        "tokens of one packed micro-batch; more need more memory", default=4096, ge=1
    )
    portion_tokens: int | None = rule(
        "portion_tokens of all jobs that do not set it. Each job's batch is split into portions of "
        "at most this many tokens per data-parallel rank, by its own sequences only. Its results "
        "are then the same bits whatever jobs train beside it, except with context parallelism, "
        "or sequence parallelism without s_lora. null: jobs share the micro-batch fairly",
        default=None,
        ge=1,
    )
    deterministic: bool = rule(
        "the same bits of a job's losses and adapter in every run of one fingerprint (kind of "
        "device, layout, versions), whoever trains beside it and however often it is stopped: "
        "fills in portion_tokens and lora_sharding, and refuses what cannot keep it (see "
        "determinism.md)",
        default=False,
    )
    round_depth: Literal[1, 2, 4, "auto"] = rule(
        "micro-batches that a data-parallel replica gets in a round. 1: one, balanced by tokens. "
        "2, 4: so many, shared out by predicted time, so that a long sequence on one replica does "
        "not make the others wait; jobs with small batches step less often (see rounds.md). auto: "
        "by predicted time, and 1, 2 or 4 as the jobs' lengths ask for: deeper only where all jobs "
        "together gain 5 %, or the smallest loses no more",
        default=1,
    )
    correct_speeds: bool = rule(
        "corrects the predicted speeds of unlike replicas by measured times whenever jobs are "
        "saved; which replica runs a sequence, and so the last bits, then depend on those times",
        default=False,
    )
    recompute: Literal["none", "selective", "full", "auto"] = rule(
        "activations to recompute in backward; saves memory and costs time. auto: each micro-batch "
        "the least that its rows and the GPUs' memory allow; long sequences then run apart from "
        "short ones (see rounds.md)",
        default="none",
    )
    gpu_memory_gb: float | None = rule(
        "memory of each GPU, in GB, that recompute: auto may count on, with what drivers and "
        "libraries take. null: all that no other process has at the start",
        default=None,
        gt=0,
    )
    checkpoint_every_steps: int = rule(
        "optimizer steps of a job between its checkpoints; 0: only at its end", default=50, ge=0
    )
    save_memory_gb: float | None = rule(
        "host memory, in GB, where saved jobs wait until they are on the disk; a job that finds "
        "none free makes the round wait. There is always room for the largest job. null: for all "
        "jobs, but at most a quarter of the free memory",
        default=None,
        gt=0,
    )
    resume: Literal["auto", "never", "always"] = rule(
        "auto continues if output_dir holds this run, and starts otherwise; never refuses an "
        "output_dir that holds a run; always refuses one that holds none",
        default="auto",
    )
    seed: int = rule(
        "added to every job's seed, to repeat a run with other random numbers",
        default=0,
        ge=0,
    )
    on_job_error: Literal["skip", "stop"] = rule(
        "a job that cannot start: leave it out, or stop the run", default="stop"
    )
    tensorboard: bool = rule("write TensorBoard events for each job", default=True)
    wandb_project: str | None = rule(
        "Weights & Biases project to log to; null: none", default=None, nonempty=True
    )
    max_nonfinite_steps: int = rule(
        "consecutive skipped updates after which a job fails", default=10, ge=1
    )
    stop_timeout_s: float = rule(
        "seconds that `tlora train --nproc` gives its processes to save and end after a signal",
        default=120.0,
        gt=0,
    )
    hang_timeout_s: float = rule(
        "seconds without any progress after which a run of several processes ends and names those "
        "that do not answer; the first rounds, which compile, have at least 600. 0: it waits",
        default=600.0,
        ge=0,
    )
    nano_batches: int | Literal["auto"] = rule(
        "number of parts of a micro-batch that hide each other's tensor-parallel communication, at "
        "most its number of sequences; auto: chosen while training, from step times. Only a fixed "
        "number makes runs repeatable to the bit, because each number sums gradients in its own "
        "order",
        default=1,
        ge=1,
        le=16,  # each takes room for what it communicates
    )
    nano_controller: Literal["best", "aimd"] = rule(
        "how nano_batches: auto chooses. best: the fastest number so far, with hysteresis; aimd: "
        "the rule of tLoRA (arXiv 2602.07263), for comparison",
        default="best",
    )
    tensor_collectives: Literal["auto", "nccl", "copy_engine"] = rule(
        "how GPUs exchange tensor-parallel results between nano-batches; auto: copy_engine if they "
        "can reach each other's memory, otherwise nccl",
        default="auto",
    )


def built_recompute(run: RunSpec) -> Literal["none", "selective", "full"]:
    """Returns what layers are built to compute again; with auto, their micro-batches say it."""
    return "none" if run.recompute == "auto" else run.recompute


def ignored_memory(run: RunSpec) -> list[str]:
    """One sentence if a budget of memory is given that nothing asks for."""
    if run.gpu_memory_gb is None or run.recompute == "auto":
        return []
    return [f"run.gpu_memory_gb has no effect with recompute {run.recompute}"]


def ignored_overlap(run: RunSpec, tp_size: int) -> list[str]:
    """One sentence for each setting of nano-batches that has no effect."""
    default = RunSpec(output_dir=run.output_dir)
    names = ("nano_batches", "nano_controller", "tensor_collectives")
    given = [name for name in names if getattr(run, name) != getattr(default, name)]
    if tp_size == 1:
        return [f"run.{name} has no effect with tp_size 1" for name in given]
    found = []
    if "nano_controller" in given and run.nano_batches != "auto":
        found.append("run.nano_controller has no effect without nano_batches: auto")
    if "tensor_collectives" in given and run.nano_batches == 1:
        found.append("run.tensor_collectives has no effect with nano_batches 1")
    return found
