"""Reads the section `jobs` of a configuration, and single jobs that come without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.reader import ConfigError, check_partial, must, read_spec
from tlora_megatron.config.rules import (
    KNOWN_TARGETS,
    check_job,
    fill_driven,
    is_usable_name,
    resolve_job_paths,
    without_filled,
)
from tlora_megatron.config.schema import JobError
from tlora_megatron.config.source import merge


def read_job(
    entry: Any,
    folder: Path | None,
    *,
    path: str = "job",
    defaults: Mapping[str, Any] | None = None,
    targets: Sequence[str] | None = KNOWN_TARGETS,
    files_may_be_missing: bool = False,
) -> JobSpec:
    """Reads and checks one job; its files must be there.

    Args:
        entry: what stands in a list of jobs.
        folder: where relative paths start; None = paths stay as they are, and nothing looks
            whether they lead anywhere.
        path: the job's place in its document, for errors.
        defaults: values for keys that the entry lacks.
        targets: as in `check_job`.
        files_may_be_missing: as in `resolve_job_paths`.

    Raises:
        ConfigError: naming the place of the first mistake.
    """
    if not isinstance(entry, dict):
        raise must(path, "be a mapping", entry)
    whole = merge(dict(defaults or {}), entry)
    job = read_spec(
        JobSpec, fill_driven(whole, path) if whole.get("driven") is True else whole, path
    )
    check_job(job, path, targets)
    if folder is None:
        return job
    return resolve_job_paths(job, path, folder, files_may_be_missing=files_may_be_missing)


def job_to_dict(job: JobSpec) -> dict[str, Any]:
    """Plain values from which `read_job` reads the same job."""
    document: dict[str, Any] = plain(asdict(job))
    return without_filled(document) if job.driven else document


def read_jobs(
    document: Mapping[str, Any],
    folder: Path,
    targets: Sequence[str] | None = KNOWN_TARGETS,
    *,
    skip: bool = False,
    files_may_be_missing: bool = False,
    settle: Callable[[JobSpec, str], JobSpec] = lambda job, path: job,
) -> tuple[tuple[JobSpec, ...], tuple[JobError, ...]]:
    """Reads the jobs of a configuration, each with its `defaults`.

    Args:
        folder: where relative paths start.
        targets: as in `check_job`.
        skip: leave jobs with mistakes out, and return their errors.
        files_may_be_missing: as in `resolve_job_paths`.
        settle: finishes a job that has been read; it gets the job's place, too.

    Raises:
        ConfigError: for the first mistake, or if no job is left.
    """
    defaults = document.get("defaults", {})
    check_partial(JobSpec, defaults, "defaults")
    if "name" in defaults:
        raise ConfigError("defaults must not hold name: every job has its own")
    entries = document.get("jobs")
    if not isinstance(entries, list) or not entries:
        raise must("jobs", "be a list of at least one job", entries)
    _refuse_duplicate_names(entries)
    jobs, errors = [], []
    for index, entry in enumerate(entries):
        path = f"jobs[{index}]"
        try:
            job = read_job(
                entry,
                folder,
                path=path,
                defaults=defaults,
                targets=targets,
                files_may_be_missing=files_may_be_missing,
            )
            jobs.append(settle(job, path))
        except ConfigError as error:
            raw_name = entry.get("name") if isinstance(entry, dict) else None
            name = raw_name if is_usable_name(raw_name) else path
            if not skip:
                raise ConfigError(
                    str(error) if name == path else f"{error} (job {name})"
                ) from error
            errors.append(JobError(name=name, message=str(error)))
    if not jobs:
        reasons = "; ".join(error.message for error in errors)
        raise ConfigError(f"jobs must hold at least one that can start, got {reasons}")
    return tuple(jobs), tuple(errors)


def as_job_list(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a document with `jobs`, also for one that is a single job beside its `base_model`."""
    if "jobs" in document or not {"name", "data", "driven"} & document.keys():
        return dict(document)
    entry = {key: value for key, value in document.items() if key != "base_model"}
    rest = {key: value for key, value in document.items() if key == "base_model"}
    return rest | {"jobs": [entry]}


def ignored_job_settings(job: JobSpec) -> list[str]:
    """One sentence for each setting of a job that has no effect, whoever trains it."""
    found = []
    if job.eval_every_steps and job.data.eval is None:
        found.append(f"eval_every_steps of job {job.name} has no effect without data.eval")
    if job.schedule.min_lr and job.schedule.name == "constant":
        found.append(f"schedule.min_lr of job {job.name} has no effect with a constant schedule")
    return found


def _refuse_duplicate_names(entries: list[Any]) -> None:
    # Always stops the run: which of the two keeps the name's output folder is not ours to choose.
    names = Counter(
        str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry
    )
    for name, count in names.items():
        if count > 1:
            raise ConfigError(f"jobs must have unique names, got {name!r} {count} times")


def plain(value: Any) -> Any:
    """The value with lists in the place of tuples, as JSON and YAML give it back."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
