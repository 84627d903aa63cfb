"""What concerns all jobs of one run: the `run` section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlora_megatron.config.job import rule


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What concerns all jobs of one run."""

    output_dir: str = rule("directory of the run, relative to the working directory", nonempty=True)
    micro_batch_tokens: int = rule("tokens of one packed micro-batch", default=4096, ge=1)
    portion_tokens: int | None = rule(
        "cut each job's batch into portions of at most so many tokens a data-parallel rank, by its "
        "own sequences alone: its bits then do not depend on its neighbours, unless nano-batches, "
        "sequence parallelism with other than s_lora, or context parallelism cut among them; null "
        "= share the room fairly",
        default=None,
        ge=1,
    )
    recompute: Literal["none", "selective", "full"] = rule(
        "activations recomputed in backward", default="none"
    )
    checkpoint_every_steps: int = rule(
        "optimizer steps of a job between its checkpoints; 0 = only at its end", default=50, ge=0
    )
    resume: Literal["auto", "never", "always"] = rule(
        "auto continues when output_dir holds this run; never refuses a directory that holds a "
        "run; always refuses one that does not",
        default="auto",
    )
    seed: int = rule(
        "added to every job's own seed: repeats a run with other adapters, orders and masks",
        default=0,
        ge=0,
    )
    on_job_error: Literal["skip", "stop"] = rule(
        "a job that cannot start is left out, or stops the run", default="stop"
    )
    tensorboard: bool = rule("write TensorBoard events per job", default=True)
    wandb_project: str | None = rule(
        "Weights & Biases project; None = not used", default=None, nonempty=True
    )
    max_nonfinite_steps: int = rule(
        "consecutive skipped updates after which a job is failed", default=10, ge=1
    )
    nano_batches: int | Literal["auto"] = rule(
        "parts of a micro-batch that hide each other's tensor-parallel communication, at most its "
        "sequences; auto = chosen while training, from step times. A fixed number keeps a run's "
        "bits from one time to the next; another number sums gradients in another order",
        default=1,
        ge=1,
        le=16,  # each takes room for what it communicates
    )
    nano_controller: Literal["best", "aimd"] = rule(
        "how nano_batches: auto chooses: the best seen, with hysteresis, or the rule of tLoRA "
        "(arXiv 2602.07263), for comparison",
        default="best",
    )
    tensor_collectives: Literal["auto", "nccl", "copy_engine"] = rule(
        "how tensor-parallel results are summed and gathered between nano-batches on GPUs: auto "
        "takes copy engines where the GPUs reach each other's memory, else nccl",
        default="auto",
    )


def ignored_overlap(run: RunSpec, tp_size: int) -> list[str]:
    """One sentence for each setting of nano-batches that the rest leaves without effect."""
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
