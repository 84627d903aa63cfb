"""The sections of a run's configuration as values: what each key is called, means and defaults to.

The fields of a job are in `job.py`. Rules that concern several fields are in `rules.py` and
`parallel_rules.py`; `load.py` reads the sections and applies them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tlora_megatron.config.job import JobSpec, rule
from tlora_megatron.config.sweep import Sweep

EMBEDDING, HEAD = "embed_tokens", "lm_head"


Recompute = Literal["none", "selective", "full"]
"""Activations to recompute in backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModelSpec:
    """The frozen base model: a Hugging Face directory, or a config.json with random weights."""

    path: str | None = rule(
        "Hugging Face model directory, relative to the configuration file",
        default=None,
        nonempty=True,
    )
    config: str | None = rule(
        "Hugging Face config.json of a model with random weights; needs random_init",
        default=None,
        nonempty=True,
    )
    random_init: bool = rule("draw the weights at random instead of reading them", default=False)
    seed: int = rule("seed of the random weights", default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = rule(
        "dtype of the base model's weights and activations; adapters keep fp32 master weights",
        default="bfloat16",
    )
    quantization: Literal["fp8"] | None = rule(
        "fp8: the layers' linears are held and multiplied in FP8 (e4m3), quantised while they are "
        "read (see fp8.md). null: as the folder is, which may be FP8 as published",
        default=None,
    )
    unquantised: tuple[str, ...] = rule(
        "what quantization: fp8 leaves in dtype: embed_tokens and lm_head always; also down_proj "
        "(of all layers), layers.0.down_proj, or layers.0 (all of it)",
        default=(EMBEDDING, HEAD),
    )
    allow_change: bool = rule(
        "let jobs go on over a base that is quantised otherwise than before",
        default=False,
    )

    @property
    def config_file(self) -> Path:
        """The Hugging Face config.json."""
        return Path(self.path) / "config.json" if self.path is not None else Path(str(self.config))

    @property
    def folder(self) -> Path:
        """The folder of the tokenizer and, unless they are drawn, the weights."""
        return self.config_file.parent

    @property
    def name(self) -> str:
        """The name that exported adapters give their base."""
        return self.path or str(self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSpec:
    """Replicas of one layout, each with the whole model on its own processes."""

    count: int = rule("number of replicas of this layout", default=1, ge=1)
    tp_size: int = rule("as parallel.tp_size", default=1, ge=1)
    pp_size: int = rule("as parallel.pp_size", default=1, ge=1)
    cp_size: int = rule("as parallel.cp_size", default=1, ge=1)
    sequence_parallel: bool = rule("as parallel.sequence_parallel", default=False)
    micro_batch_tokens: int | None = rule(
        "tokens of one of its packed micro-batches; null: run.micro_batch_tokens",
        default=None,
        ge=1,
    )
    recompute: Recompute | None = rule("as run.recompute; null: run.recompute", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSpec:
    """The way in which processes share the model; processes left over are data-parallel."""

    tp_size: int = rule("processes that share each layer (tensor parallelism)", default=1, ge=1)
    pp_size: int = rule(
        "pipeline stages: groups of layers, each on its own processes", default=1, ge=1
    )
    first_stage_layers: int | None = rule(
        "layers of the first pipeline stage; null: as many as each middle stage has",
        default=None,
        ge=1,
    )
    last_stage_layers: int | None = rule(
        "layers of the last pipeline stage, likewise", default=None, ge=1
    )
    cp_size: int = rule("processes that share each sequence (context parallelism)", default=1, ge=1)
    cp_by_micro_batch: bool = rule(
        "share only long sequences among all `cp_size` processes, and short ones among fewer, as "
        "is predicted to end first (see rounds.md)",
        default=False,
    )
    sequence_parallel: bool = rule(
        "also split activations between layers by token, which saves memory", default=False
    )
    ep_size: int = rule(
        "processes that share the routed experts of each layer (expert parallelism, Megatron's "
        "--expert-model-parallel-size; see experts.md)",
        default=1,
        ge=1,
    )
    expert_tp_size: int | None = rule(
        "tensor-parallel processes that share each routed expert (Megatron's "
        "--expert-tensor-parallel-size): tp_size, or 1 with sequence_parallel; null: tp_size",
        default=None,
        ge=1,
    )
    lora_sharding: Literal["auto", "fold", "rank_exchange", "s_lora"] = rule(
        "how tensor-parallel processes share standard adapters (see lora_sharding.md), with the "
        "same losses; auto: the one predicted to be fastest",
        default="auto",
    )
    shard_optimizer: bool = rule(
        "divide adapters' fp32 weights and Adam moments over data- and context-parallel "
        "processes, as ZeRO-1 does: the same bits in less memory, for one more exchange a step",
        default=False,
    )
    replicas: tuple[ReplicaSpec, ...] | None = rule(
        "replicas of unlike layouts, instead of the sizes above (see replicas.md): a list of "
        "{count, tp_size, pp_size, cp_size, sequence_parallel, micro_batch_tokens, recompute}, or "
        "the short form `1xCP8@65536 + 2xTP2+SP@12288/selective`. null: all are alike",
        default=None,
        nonempty=True,
    )

    @property
    def is_unlike(self) -> bool:
        """True if replicas have layouts, budgets or recompute of their own."""
        return self.replicas is not None and len(self.replicas) > 1

    @property
    def any_sequence_parallel(self) -> bool:
        """True if some replica has sequence parallelism."""
        return any(spec.sequence_parallel for spec in self.replicas or (self,))

    @property
    def most_tp(self) -> int:
        """Tensor-parallel ranks of the replica that has most."""
        return max((spec.tp_size for spec in self.replicas or ()), default=self.tp_size)


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
        "jobs.portion_tokens of all jobs that do not set it",
        default=None,
        ge=1,
    )
    deterministic: bool = rule(
        "the same bits of a job's losses and adapter beside any jobs, on one kind of device, "
        "layout and version: fills in portion_tokens and lora_sharding, and refuses what cannot "
        "keep it (see determinism.md)",
        default=False,
    )
    round_depth: Literal[1, 2, 4, "auto"] = rule(
        "micro-batches that a data-parallel replica gets in a round. 1: one, balanced by tokens. "
        "2, 4: so many, shared out by predicted time; jobs with small batches step less often. "
        "auto: by predicted time, deeper only where it pays (see rounds.md)",
        default=1,
    )
    correct_speeds: bool = rule(
        "correct predicted speeds of unlike replicas by measured times whenever jobs are saved; "
        "the last bits then depend on those times",
        default=False,
    )
    recompute: Literal["none", "selective", "full", "auto"] = rule(
        "activations to recompute in backward; saves memory and costs time. auto: each "
        "micro-batch the least that memory allows; long sequences then run apart from short ones "
        "(see rounds.md)",
        default="none",
    )
    gpu_memory_gb: float | None = rule(
        "memory of each GPU, in GB, that recompute: auto may count on. null: all that no other "
        "process has at the start",
        default=None,
        gt=0,
    )
    checkpoint_every_steps: int = rule(
        "optimizer steps of a job between its checkpoints; 0: only at its end", default=50, ge=0
    )
    save_memory_gb: float | None = rule(
        "host memory, in GB, where saved jobs wait until they are on the disk; a job that finds "
        "none free makes the round wait. null: for all jobs, but at most a quarter of the free "
        "memory",
        default=None,
        gt=0,
    )
    resume: Literal["auto", "never", "always"] = rule(
        "auto continues if output_dir holds this run; never refuses an output_dir that holds a "
        "run, always one that holds none",
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
        "seconds for the processes of `tlora train --nproc` to save and end after a signal",
        default=120.0,
        gt=0,
    )
    hang_timeout_s: float = rule(
        "seconds without progress after which a run of several processes ends and names those "
        "that do not answer; at least 600 for the first rounds. 0: it waits",
        default=600.0,
        ge=0,
    )
    nano_batches: int | Literal["auto"] = rule(
        "number of parts of a micro-batch that hide each other's tensor-parallel communication, "
        "at most its number of sequences; auto: chosen from step times. Only a fixed number makes "
        "runs repeatable to the bit (see overlap.md)",
        default=1,
        ge=1,
        le=16,  # each takes room for what it communicates
    )
    nano_controller: Literal["best", "aimd"] = rule(
        "how nano_batches: auto chooses: the fastest number so far, or the rule of tLoRA (arXiv "
        "2602.07263), for comparison",
        default="best",
    )
    tensor_collectives: Literal["auto", "nccl", "copy_engine"] = rule(
        "how GPUs exchange results between nano-batches; auto: copy_engine if they can reach each "
        "other's memory, otherwise nccl",
        default="auto",
    )


def shared_fields(source: Any, kind: Any) -> dict[str, Any]:
    """The values that a section, a layout or a plan has for fields of another dataclass."""
    names = (item.name for item in fields(kind))
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


def built_recompute(run: RunSpec) -> Literal["none", "selective", "full"]:
    """Returns what layers are built to compute again; with auto, their micro-batches say it."""
    return "none" if run.recompute == "auto" else run.recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class JobError:
    """The reason why a job was left out; `name` is `jobs[i]` if the job has no usable name."""

    name: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A checked configuration: paths are absolute, all defaults are filled in."""

    base_model: BaseModelSpec
    parallel: ParallelSpec
    run: RunSpec
    jobs: tuple[JobSpec, ...]
    job_errors: tuple[JobError, ...] = ()
    """Jobs left out under `run.on_job_error: skip`."""
    sweep: Sweep | None = None
    """Whose trials the jobs are; None = they are no trials."""

    @property
    def longest_sequence(self) -> int:
        """Rows of the longest sequence that some replica's micro-batch holds."""
        own = (spec.micro_batch_tokens for spec in self.parallel.replicas or ())
        return max((tokens for tokens in own if tokens), default=self.run.micro_batch_tokens)
