"""Checks the rules of a configuration that concern several fields, and resolves its paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from tlora_megatron.config.block_rules import check_blocks
from tlora_megatron.config.job import (
    EXPERT_TARGETS,
    FUSED_EXPERT_TARGETS,
    HF_TARGETS,
    MEGATRON_TARGETS,
    SHARED_EXPERT_TARGETS,
    JobSpec,
)
from tlora_megatron.config.reader import ConfigError, must, nearest

if TYPE_CHECKING:
    from tlora_megatron.config.load import ParallelSpec

KNOWN_TARGETS = (
    HF_TARGETS + SHARED_EXPERT_TARGETS + MEGATRON_TARGETS + EXPERT_TARGETS + FUSED_EXPERT_TARGETS
)

_BASE_LINEAR = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    "experts.gate_proj": "experts.linear_fc1",
    "experts.up_proj": "experts.linear_fc1",
    "experts.down_proj": "experts.linear_fc2",
}


def is_usable_name(name: Any) -> TypeGuard[str]:
    """True if `name` can be the name of an output folder."""
    return (
        isinstance(name, str)
        and re.fullmatch(r"(?!-)[A-Za-z0-9._-]{1,128}", name) is not None
        and name not in (".", "..")
    )


def check_job(job: JobSpec, path: str, targets: Sequence[str] | None = KNOWN_TARGETS) -> None:
    """Refuses a job whose fields contradict each other.

    Args:
        job: the job to check.
        path: place of the job in the configuration, such as `jobs[0]`.
        targets: names that `lora.target_modules` may hold; None: any, the model decides later.

    Raises:
        ConfigError: naming the field below `path`.
    """
    if not is_usable_name(job.name):
        obligation = "be at most 128 of A-Z a-z 0-9 . _ -, not start with - and not be . or .."
        raise must(f"{path}.name", obligation, job.name)
    _check_steps(job, path)
    _check_targets(job, path, targets)
    check_blocks(job.lora, f"{path}.lora")


def _check_steps(job: JobSpec, path: str) -> None:
    if job.driven:
        return
    if (job.max_steps is None) == (job.epochs is None):
        got = "neither" if job.max_steps is None else "both; set the other to null"
        raise ConfigError(f"{path} must set exactly one of max_steps and epochs, got {got}")
    warmup = job.schedule.warmup_steps
    if job.max_steps is not None and warmup >= job.max_steps:
        raise must(f"{path}.schedule.warmup_steps", f"be below max_steps = {job.max_steps}", warmup)
    if warmup and job.schedule.warmup_ratio:
        told = "set at most one of warmup_steps and warmup_ratio, got both; set the other to 0"
        raise ConfigError(f"{path}.schedule must {told}")
    if job.schedule.min_lr > job.optimizer.lr:
        raise must(
            f"{path}.schedule.min_lr",
            f"be at most optimizer.lr = {job.optimizer.lr}",
            job.schedule.min_lr,
        )


def check_stages(parallel: ParallelSpec) -> None:
    """Refuses sizes of pipeline stages where there is no pipeline, or more than one.

    Raises:
        ConfigError: naming the key.
    """
    for key in ("first_stage_layers", "last_stage_layers"):
        given = getattr(parallel, key)
        if given is None:
            continue
        if parallel.is_unlike:
            rule = "be absent beside unlike parallel.replicas, whose stages are even"
            raise must(f"parallel.{key}", rule, given)
        if parallel.pp_size == 1:
            raise must(f"parallel.{key}", "be absent where parallel.pp_size is 1", given)


def _check_targets(job: JobSpec, path: str, known: Sequence[str] | None) -> None:
    targets = job.lora.target_modules
    path = f"{path}.lora.target_modules"
    for index, target in enumerate(targets):
        if known is not None and target not in known:
            obligation = f"be one of {', '.join(known)}"
            raise must(f"{path}[{index}]", obligation, target, nearest(target, known))
    for target, count in Counter(targets).items():
        if count > 1:
            raise ConfigError(f"{path} must not repeat a target, got {target} {count} times")
    for target in targets:
        fused = _BASE_LINEAR.get(target)
        if fused in targets:
            raise ConfigError(
                f"{path} must name each base linear once, got {target} and {fused}, which holds it"
            )


def resolve_job_paths(
    job: JobSpec, path: str, folder: Path, *, files_may_be_missing: bool = False
) -> JobSpec:
    """Makes the job's paths absolute.

    Args:
        path: the job's place in its document, for errors.
        folder: where relative paths start.
        files_may_be_missing: nothing looks whether files and directories are there.

    Raises:
        ConfigError: naming the key of what is not there.
    """

    def file(key: str, value: str | None) -> str | None:
        if value is None or (job.driven and key == "data.train"):
            return value
        if files_may_be_missing:
            return resolve(value, folder)
        return existing_file(value, folder, f"{path}.{key}")

    def directory(key: str, value: str | None) -> str | None:
        found = None if value is None else resolve(value, folder)
        if found is not None and not files_may_be_missing and not Path(found).is_dir():
            raise must(f"{path}.{key}", "be an existing directory", found)
        return found

    train, evaluation = file("data.train", job.data.train), file("data.eval", job.data.eval)
    return replace(
        job,
        data=replace(job.data, train=str(train), eval=evaluation),
        init_from=directory("init_from", job.init_from),
        resume_from=directory("resume_from", job.resume_from),
    )


def existing_file(value: str, folder: Path, path: str) -> str:
    """The absolute path of a file, which must exist and not be empty; `path` names the field."""
    file = resolve(value, folder)
    if not Path(file).is_file():
        raise must(path, "be an existing file", file)
    if Path(file).stat().st_size == 0:
        raise must(path, "be a file that is not empty", file)
    return file


def resolve(value: str, folder: Path) -> str:
    """Makes a path absolute; a relative one starts at `folder`."""
    return str((folder / Path(value).expanduser()).resolve())
