"""Loads the configuration of a run: reads its sections, applies all rules, fills in defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tlora_megatron.config.documents import read_document
from tlora_megatron.config.job import JobSpec, ServiceSpec
from tlora_megatron.config.parallel_rules import (
    check_cp_by_micro_batch,
    check_expert_sizes,
    check_replicas,
    check_stages,
    settle_deterministic,
    settle_replicas,
)
from tlora_megatron.config.reader import ConfigError, must, read_spec, unknown
from tlora_megatron.config.rules import KNOWN_TARGETS, resolve
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.config.sections import (
    expand_short_form,
    ignored_base_settings,
    ignored_job_settings,
    plain,
    read_base_model,
    read_jobs,
    short_form,
)

SECTIONS = ("base_model", "parallel", "run", "defaults", "jobs")


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
    return read_config(
        read_document(path, overrides=overrides),
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
    """Checks a configuration that has already been read, as `load_config` does.

    Args:
        folder: where relative paths start.
        targets: as in `check_job`.
        base_model: replaces the section `base_model`, which may then be absent.
    """
    is_guest = targets is None or base_model is not None
    base_model, parallel, run = _read_sections(document, SECTIONS, folder, output_dir, base_model)
    jobs, errors = read_jobs(
        document,
        folder,
        targets,
        skip=run.on_job_error == "skip",
        files_may_be_missing=files_may_be_missing,
        settle=partial(_with_portions, run),
    )
    for job in jobs if is_guest else ():
        if job.preference is not None:
            rule = "be left out in somebody else's trainer"
            raise must(f"preference of job {job.name!r}", rule, True, "`tlora train` has it")
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
        output_dir: the folder that holds `jobs/NAME`.
    """
    base_model, parallel, run = _read_sections(
        sections, ("base_model", "parallel", "run"), folder, str(output_dir)
    )
    check_jobs_may_change(parallel, run)
    return _settled(RunConfig(base_model=base_model, parallel=parallel, run=run, jobs=()))


def check_jobs_may_change(parallel: ParallelSpec, run: RunSpec) -> None:
    """Refuses settings that are chosen from all jobs of a run, where further ones may come."""
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
        may_be_driven: somebody hands clients' requests to the super-model.

    Raises:
        ConfigError: naming the job and what the super-model cannot keep.
    """
    job = _with_portions(config.run, job, f"job {job.name}", may_be_driven=may_be_driven)
    return _settled(replace(config, jobs=(job,))).jobs[0]


def _settled(config: RunConfig, *, settle: bool = True) -> RunConfig:
    _check_portion(config.run.portion_tokens, config.run, "run")
    check_replicas(config)
    check_cp_by_micro_batch(config)
    check_stages(config.parallel)
    check_expert_sizes(config.parallel)
    return settle_deterministic(config) if settle else config


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values from which `load_config` reads the same configuration, without jobs left out."""
    document: dict[str, Any] = plain(
        {
            "base_model": config.base_model,
            "parallel": config.parallel,
            "run": config.run,
            "jobs": config.jobs,
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
    found += _ignored_overlap(config.run, tp_size)
    run = config.run
    if run.gpu_memory_gb is not None and run.recompute != "auto":
        found.append(f"run.gpu_memory_gb has no effect with recompute {run.recompute}")
    found += ignored_base_settings(config.base_model)
    for job in config.jobs:
        found += ignored_job_settings(job)
        if job.service != ServiceSpec():
            found.append(f"service of job {job.name} has an effect with `tlora submit` alone")
    return tuple(found)


def _read_sections(
    document: Mapping[str, Any],
    known: Sequence[str],
    folder: Path,
    output_dir: str | None,
    base_model: BaseModelSpec | None = None,
) -> tuple[BaseModelSpec, ParallelSpec, RunSpec]:
    """Reads the sections of a run, and refuses any that is not known."""
    for key in document:
        if key not in known:
            raise unknown("", key, known)
    raw = document.get("run", {})
    if output_dir is not None and isinstance(raw, dict):
        raw = {**raw, "output_dir": output_dir}
    run = read_spec(RunSpec, raw, "run")
    run = replace(run, output_dir=resolve(run.output_dir, Path.cwd()))
    if base_model is None:
        base_model = read_base_model(document.get("base_model"), folder)
    raw = document.get("parallel", {})
    if isinstance(raw, dict) and "replicas" in raw:
        raw = raw | {"replicas": expand_short_form(raw["replicas"], "parallel.replicas")}
    return base_model, *settle_replicas(read_spec(ParallelSpec, raw, "parallel"), run)


def _check_portion(portion_tokens: int | None, run: RunSpec, path: str) -> None:
    if portion_tokens is not None and portion_tokens > run.micro_batch_tokens:
        limit = f"be at most run.micro_batch_tokens = {run.micro_batch_tokens}"
        raise must(f"{path}.portion_tokens", limit, portion_tokens)


def _with_portions(
    run: RunSpec, job: JobSpec, path: str, *, may_be_driven: bool = False
) -> JobSpec:
    """Gives a job the run's portions unless it has its own; refuses one without a client."""
    if job.driven and not may_be_driven:
        raise ConfigError(
            f"driven of job {job.name!r} must be false here: its client asks a service, "
            "`tlora serve`"
        )
    _check_portion(job.portion_tokens, run, path)
    return replace(job, portion_tokens=job.portion_tokens or run.portion_tokens)


def _ignored_overlap(run: RunSpec, tp_size: int) -> list[str]:
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
