"""Checks the rules of a configuration that concern several fields, and resolves its paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from tlora_megatron.config.block_rules import check_blocks
from tlora_megatron.config.job import HF_TARGETS, MEGATRON_TARGETS, SHARED_EXPERT_TARGETS, JobSpec
from tlora_megatron.config.reader import ConfigError, must, nearest

KNOWN_TARGETS = HF_TARGETS + SHARED_EXPERT_TARGETS + MEGATRON_TARGETS

_BASE_LINEAR = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
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


def resolve_job_paths(job: JobSpec, path: str, folder: Path) -> JobSpec:
    """Makes the job's paths absolute; its files and directories must exist."""
    train = existing_file(job.data.train, folder, f"{path}.data.train")
    evaluation, init_from, resume_from = job.data.eval, job.init_from, job.resume_from
    if evaluation is not None:
        evaluation = existing_file(evaluation, folder, f"{path}.data.eval")
    if init_from is not None:
        init_from = resolve(init_from, folder)
        if not Path(init_from).is_dir():
            raise must(f"{path}.init_from", "be an existing directory", init_from)
    if resume_from is not None:
        resume_from = resolve(resume_from, folder)
        if not Path(resume_from).is_dir():
            raise must(f"{path}.resume_from", "be an existing directory", resume_from)
    data = replace(job.data, train=train, eval=evaluation)
    return replace(job, data=data, init_from=init_from, resume_from=resume_from)


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
