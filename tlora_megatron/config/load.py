"""Loads the configuration of a run and defines its sections.

The fields of a job are in `job.py`, those of the sections `base_model` and `run` in files of their
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tlora_megatron.config.base_model import (
    BaseModelSpec,
    ignored_base_settings,
    read_base_model,
)
from tlora_megatron.config.deterministic import settle_deterministic
from tlora_megatron.config.driven import refuse_driven
from tlora_megatron.config.job import JobSpec, ServiceSpec, rule
from tlora_megatron.config.jobs import JobError, ignored_job_settings, plain, read_jobs
from tlora_megatron.config.parallel_rules.cp import check_cp_by_micro_batch
from tlora_megatron.config.parallel_rules.experts import check_expert_sizes
from tlora_megatron.config.parallel_rules.replicas import check_replicas, settle_replicas
from tlora_megatron.config.reader import ConfigError, must, read_spec, unknown
from tlora_megatron.config.replicas import ReplicaSpec, expand_short_form, short_form
from tlora_megatron.config.rules import KNOWN_TARGETS, check_stages, resolve
from tlora_megatron.config.run import RunSpec, ignored_memory, ignored_overlap
from tlora_megatron.config.source import apply_override, read_document

__all__ = [
    "BaseModelSpec",
    "ConfigError",
    "JobError",
    "ParallelSpec",
    "RunConfig",
    "RunSpec",
    "check_jobs_may_change",
    "config_to_dict",
    "fit_job",
    "ignored_settings",
    "load_config",
    "read_config",
    "read_gang_config",
]

SECTIONS = ("base_model", "parallel", "run", "defaults", "jobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSpec:
    """The way in which processes share the model; processes left over are data-parallel."""

    tp_size: int = rule("processes that share each layer (tensor parallelism)", default=1, ge=1)
    pp_size: int = rule(
        "pipeline stages: groups of layers, each on its own processes", default=1, ge=1
    )
    first_stage_layers: int | None = rule(
        "layers of the first pipeline stage (126 layers: 16 stages with 7 in the first and 7 in "
        "the last); null: as many as each middle stage has",
        default=None,
        ge=1,
    )
    last_stage_layers: int | None = rule(
        "layers of the last pipeline stage, likewise", default=None, ge=1
    )
    cp_size: int = rule("processes that share each sequence (context parallelism)", default=1, ge=1)
    cp_by_micro_batch: bool = rule(
        "let long sequences alone be shared by all `cp_size` processes, and short ones by fewer or "
        "one each, whichever is predicted to end first (see rounds.md)",
        default=False,
    )
    sequence_parallel: bool = rule(
        "also split activations between layers by token, which saves memory", default=False
    )
    ep_size: int = rule(
        "processes that share the routed experts of each layer, each with some of them whole or "
        "as expert_tp_size cuts them (expert parallelism, Megatron's "
        "--expert-model-parallel-size); they are data-parallel, context-parallel or, with "
        "expert_tp_size 1, tensor-parallel processes as well",
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
        "how tensor-parallel processes share standard adapters (see lora_sharding.md); auto: the "
        "one predicted to be fastest. All give the same losses and checkpoints",
        default="auto",
    )
    shard_optimizer: bool = rule(
        "divide every adapter's fp32 weights and Adam moments over data- and context-parallel "
        "processes, as ZeRO-1 and Megatron's distributed optimizer do: the same bits in less "
        "memory, for one more exchange an optimizer step",
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
class RunConfig:
    """A checked configuration: paths are absolute, all defaults are filled in."""

    base_model: BaseModelSpec
    parallel: ParallelSpec
    run: RunSpec
    jobs: tuple[JobSpec, ...]
    job_errors: tuple[JobError, ...] = ()
    """Jobs left out under `run.on_job_error: skip`."""

    @property
    def longest_sequence(self) -> int:
        """Rows of the longest sequence that some replica's micro-batch holds."""
        own = (spec.micro_batch_tokens for spec in self.parallel.replicas or ())
        return max((tokens for tokens in own if tokens), default=self.run.micro_batch_tokens)


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    output_dir: str | None = None,
    *,
    settle: bool = True,
    files_may_be_missing: bool = False,
) -> RunConfig:
    """Reads and checks a YAML or JSON configuration.

    Args:
        path: the file; relative paths in `data`, `init_from` and `base_model` start at its folder.
        overrides: texts `path=value`, applied in order before any check.
        output_dir: replaces `run.output_dir`; relative to the working directory.
        settle: fill in what `run.deterministic` needs; a search for a layout does it afterwards.
        files_may_be_missing: those of jobs may lie on another machine, as for a plan they may.

    Raises:
        ConfigError: for the first mistake. With `run.on_job_error: skip`, a mistake inside one job
            is added to `job_errors` instead, unless no job is left.
    """
    path = Path(path)
    document = read_document(path)
    for override in overrides:
        apply_override(document, override)
    return read_config(
        document,
        path.resolve().parent,
        output_dir=output_dir,
        settle=settle,
        files_may_be_missing=files_may_be_missing,
    )


def read_config(
    document: dict[str, Any],
    folder: Path,
    *,
    output_dir: str | None = None,
    targets: Sequence[str] | None = KNOWN_TARGETS,
    base_model: BaseModelSpec | None = None,
    settle: bool = True,
    files_may_be_missing: bool = False,
) -> RunConfig:
    """Checks a configuration that has already been read.

    Args:
        folder: where relative paths start.
        output_dir: as in `load_config`.
        targets: as in `check_job`.
        base_model: replaces the section `base_model`, which may then be absent.
        settle: as in `load_config`.
        files_may_be_missing: as in `load_config`.

    Raises:
        ConfigError: as in `load_config`.
    """
    for key in document:
        if key not in SECTIONS:
            raise unknown("", key, SECTIONS)
    run = _read_run(document.get("run", {}), output_dir)
    if base_model is None:
        base_model = read_base_model(document.get("base_model"), folder)
    parallel, run = settle_replicas(_read_parallel(document.get("parallel", {})), run)
    _check_portion(run.portion_tokens, run, "run")
    jobs, errors = read_jobs(
        document,
        folder,
        targets,
        skip=run.on_job_error == "skip",
        files_may_be_missing=files_may_be_missing,
        settle=partial(_with_data_and_portions, run),
    )
    config = RunConfig(
        base_model=base_model, parallel=parallel, run=run, jobs=jobs, job_errors=errors
    )
    return _settled(config, settle=settle)


def read_gang_config(
    sections: Mapping[str, Any], folder: Path, *, output_dir: str | Path
) -> RunConfig:
    """Checks the configuration of a super-model whose jobs come and go: it has none.

    Args:
        sections: `base_model`, and where they differ from the defaults `parallel` and `run`.
        folder: where relative paths start.
        output_dir: the folder that holds `jobs/NAME`.

    Raises:
        ConfigError: as in `load_config`.
    """
    known = ("base_model", "parallel", "run")
    for key in sections:
        if key not in known:
            raise unknown("", key, known)
    run = _read_run(sections.get("run", {}), str(output_dir))
    base_model = read_base_model(sections.get("base_model"), folder)
    parallel, run = settle_replicas(_read_parallel(sections.get("parallel", {})), run)
    check_jobs_may_change(parallel, run)
    return _settled(RunConfig(base_model=base_model, parallel=parallel, run=run, jobs=()))


def check_jobs_may_change(parallel: ParallelSpec, run: RunSpec) -> None:
    """Refuses settings that are chosen from all jobs of a run, where further ones may come.

    Raises:
        ConfigError: naming the setting.
    """
    where = "for a super-model whose jobs come and go"
    if parallel.is_unlike:
        raise must("parallel.replicas", f"be alike {where}", short_form(parallel.replicas or ()))
    if parallel.cp_by_micro_batch:
        raise must("parallel.cp_by_micro_batch", f"be false {where}", True)
    if run.recompute == "auto":
        rule = f"be none, selective or full {where}: nobody knows what they need"
        raise must("run.recompute", rule, run.recompute)


def fit_job(job: JobSpec, config: RunConfig, *, may_be_driven: bool = False) -> JobSpec:
    """Fits a job that was read alone to the super-model that it is to join.

    Args:
        config: of the super-model.
        may_be_driven: somebody hands clients' requests to the super-model.

    Raises:
        ConfigError: naming the job and what the super-model cannot keep.
    """
    fit = _with_portions if may_be_driven else _with_data_and_portions
    job = fit(config.run, job, f"job {job.name}")
    return _settled(replace(config, jobs=(job,))).jobs[0]


def _settled(config: RunConfig, *, settle: bool = True) -> RunConfig:
    _check_portion(config.run.portion_tokens, config.run, "run")
    check_replicas(config)
    check_cp_by_micro_batch(config)
    check_stages(config.parallel)
    check_expert_sizes(config.parallel)
    return settle_deterministic(config) if settle else config


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values from which `load_config` reads the same configuration.

    Jobs that were left out are missing.
    """
    document: dict[str, Any] = plain(
        {
            "base_model": asdict(config.base_model),
            "parallel": asdict(config.parallel),
            "run": asdict(config.run),
            "jobs": [asdict(job) for job in config.jobs],
        }
    )
    return document


def ignored_settings(config: RunConfig) -> tuple[str, ...]:
    """One sentence for each setting that has no effect in this configuration."""
    found = []
    tp_size = config.parallel.most_tp
    if config.parallel.sequence_parallel and tp_size == 1:
        found.append("parallel.sequence_parallel has no effect with tp_size 1")
    if config.parallel.lora_sharding != "auto" and tp_size == 1:
        found.append("parallel.lora_sharding has no effect with tp_size 1")
    if config.parallel.cp_by_micro_batch and config.parallel.cp_size == 1:
        found.append("parallel.cp_by_micro_batch has no effect with cp_size 1")
    if config.run.correct_speeds and (config.run.deterministic or not config.parallel.replicas):
        why = "with deterministic" if config.run.deterministic else "without parallel.replicas"
        found.append(f"run.correct_speeds has no effect {why}")
    found += ignored_overlap(config.run, tp_size)
    found += ignored_memory(config.run)
    found += ignored_base_settings(config.base_model)
    for job in config.jobs:
        found += ignored_job_settings(job)
        if job.service != ServiceSpec():
            found.append(f"service of job {job.name} has an effect with `tlora submit` alone")
    return tuple(found)


def _read_parallel(raw: Any) -> ParallelSpec:
    if isinstance(raw, dict) and "replicas" in raw:
        raw = raw | {"replicas": expand_short_form(raw["replicas"], "parallel.replicas")}
    return read_spec(ParallelSpec, raw, "parallel")


def _read_run(raw: Any, output_dir: str | None) -> RunSpec:
    if output_dir is not None and isinstance(raw, dict):
        raw = {**raw, "output_dir": output_dir}
    run = read_spec(RunSpec, raw, "run")
    return replace(run, output_dir=resolve(run.output_dir, Path.cwd()))


def _check_portion(portion_tokens: int | None, run: RunSpec, path: str) -> None:
    if portion_tokens is not None and portion_tokens > run.micro_batch_tokens:
        limit = f"be at most run.micro_batch_tokens = {run.micro_batch_tokens}"
        raise must(f"{path}.portion_tokens", limit, portion_tokens)


def _with_data_and_portions(run: RunSpec, job: JobSpec, path: str) -> JobSpec:
    """Refuses a job that waits for a client."""
    if job.driven:
        raise refuse_driven(job.name)
    return _with_portions(run, job, path)


def _with_portions(run: RunSpec, job: JobSpec, path: str) -> JobSpec:
    """Gives a job the run's portions unless it has its own."""
    _check_portion(job.portion_tokens, run, path)
    return replace(job, portion_tokens=job.portion_tokens or run.portion_tokens)
