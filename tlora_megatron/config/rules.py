"""Rules of one job that concern several of its fields, and the paths and portions it is given."""

from __future__ import annotations

import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from tlora_megatron.config.job import (
    EXPERT_TARGETS,
    FUSED_EXPERT_TARGETS,
    HF_TARGETS,
    MEGATRON_TARGETS,
    SHARED_EXPERT_TARGETS,
    JobSpec,
    LoraSpec,
)
from tlora_megatron.config.reader import ConfigError, must, nearest
from tlora_megatron.files import shipped_folder

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
_FUSED = {"linear_qkv": "q_proj, k_proj and v_proj", "linear_fc1": "gate_proj and up_proj"}
"""Fused targets and the single modules to name instead; a block belongs to one module."""
NO_DATA = "(none: a client sends it)"
"""The value of `data.train` of a job that has no data."""
LEFT_OUT_IF_DRIVEN = (
    "data",
    "max_steps",
    "epochs",
    "optimizer",
    "schedule",
    "eval_every_steps",
    "on_nonfinite",
    "preference",
)
"""Keys whose values come with a client's requests, or that have no meaning."""
PORTION_STEP_TOKENS = 1024
"""Portions are multiples of it, so that jobs of like load get the same and share rounds well."""


def is_usable_name(name: Any) -> TypeGuard[str]:
    """True if `name` can be the name of an output folder."""
    return (
        isinstance(name, str)
        and re.fullmatch(r"(?!-)[A-Za-z0-9._-]{1,128}", name) is not None
        and name not in (".", "..")
    )


def check_job(job: JobSpec, path: str, targets: Sequence[str] | None = KNOWN_TARGETS) -> None:
    """Refuses a job whose fields contradict each other, by names below `path` such as `jobs[0]`.

    `targets` are names that `lora.target_modules` may hold; None: any, the model decides later.
    """
    if not is_usable_name(job.name):
        obligation = "be at most 128 of A-Z a-z 0-9 . _ -, not start with - and not be . or .."
        raise must(f"{path}.name", obligation, job.name)
    if job.preference is not None and job.data.learn != "all":
        raise must(f"{path}.data.learn", "be all with preference", job.data.learn)
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


def check_blocks(lora: LoraSpec, path: str) -> None:
    """Refuses a parametrisation that contradicts itself, for any model, with the nearest values."""
    blocks, rank = lora.num_blocks, lora.rank
    if not lora.is_block_diagonal:
        if blocks != 1:
            raise ConfigError(
                f"{path}.num_blocks must be 1 with parametrization standard, got {blocks}; set "
                f"parametrization: block_diagonal"
            )
        return
    if blocks < 2:
        raise ConfigError(
            f"{path}.num_blocks must be at least 2 with parametrization block_diagonal, got "
            f"{blocks}; give the tp_size that the adapter is to be trained and served with"
        )
    if rank % blocks:
        ranks = either_of(r for r in (rank // blocks * blocks, -(-rank // blocks) * blocks) if r)
        divisors = either_of(
            nearest_options(blocks, (n for n in range(2, rank + 1) if rank % n == 0))
        )
        others = f", or num_blocks {divisors}" if divisors else ""
        raise ConfigError(
            f"{path}.rank must be a multiple of num_blocks = {blocks}, got {rank}; the nearest "
            f"are {ranks}{others}"
        )
    for target in lora.target_modules:
        if target in _FUSED:
            raise ConfigError(
                f"{path}.target_modules must name single modules with parametrization "
                f"block_diagonal, got {target}; name {_FUSED[target]}"
            )


def nearest_options(value: int, options: Iterable[int]) -> list[int]:
    """The nearest option below `value` and the nearest above it, where they exist."""
    options = list(options)
    below = [n for n in options if n < value][-1:]
    return below + [n for n in options if n > value][:1]


def either_of(numbers: Iterable[int]) -> str:
    """The numbers as text: `4 or 8`."""
    return " or ".join(str(n) for n in dict.fromkeys(numbers))


def fill_driven(entry: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns a driven job's entry with values where others have data; refuses data."""
    for key in LEFT_OUT_IF_DRIVEN:
        if entry.get(key) is not None:
            why = "a client sends what it is to be"
            raise must(f"{path}.{key}", "be left out of a driven job", entry[key], why)
    return {**entry, "data": {"train": NO_DATA}}


def portion_of(
    lengths: Iterable[tuple[int, float]], batch_size: int, micro_batch_tokens: int
) -> int:
    """Returns the `portion_tokens` of a job that has none: a whole batch, if there is room.

    The least multiple of 1,024 that covers nearly all batches (two standard deviations above the
    mean), but at most half a micro-batch, so that two jobs always fit into one. It depends on the
    job and the service's micro-batch alone, so that it keeps the job's bits wherever the job goes.

    Args:
        lengths: pairs of rows and share of sequences, whose shares add up to 1.
    """
    pairs = tuple(lengths)
    mean = sum(rows * share for rows, share in pairs)
    variance = max(0.0, sum(rows * rows * share for rows, share in pairs) - mean * mean)
    batch = batch_size * mean + 2 * math.sqrt(batch_size * variance)
    # The shares' rounding must not add a step to what is an exact multiple.
    steps = max(1, math.ceil(batch / PORTION_STEP_TOKENS - 1e-6))
    return max(1, min(steps * PORTION_STEP_TOKENS, micro_batch_tokens // 2))


def resolve_job_paths(
    job: JobSpec, path: str, folder: Path, *, files_may_be_missing: bool = False
) -> JobSpec:
    """Makes the job's paths, which start at a folder, absolute; refuses missing ones."""

    def file(key: str, value: str, remedy: str = "") -> str:
        if files_may_be_missing:
            return resolve(value, folder)
        if _HUB_NAME.fullmatch(value) and not remedy:
            remedy = "tlora data import fetches a data set"
        return existing_file(value, folder, f"{path}.{key}", remedy)

    def files(key: str, value: str | tuple[str, ...] | None) -> Any:
        if value is None or (job.driven and key == "data.train"):
            return value
        if isinstance(value, str):
            return file(key, value)
        return tuple(file(f"{key}[{index}]", each) for index, each in enumerate(value))

    def directory(key: str, value: str | None) -> str | None:
        found = None if value is None else resolve(value, folder)
        if found is not None and not files_may_be_missing and not Path(found).is_dir():
            raise must(f"{path}.{key}", "be an existing directory", found)
        return found

    template = job.data.chat_template
    if template is not None and template not in (ours := shipped_templates()):
        template = file("data.chat_template", template, f"ours are {', '.join(ours)}")
    return replace(
        job,
        data=replace(
            job.data,
            train=files("data.train", job.data.train),
            eval=files("data.eval", job.data.eval),
            chat_template=template,
        ),
        init_from=directory("init_from", job.init_from),
        resume_from=directory("resume_from", job.resume_from),
    )


_HUB_NAME = re.compile(r"[\w-][\w.-]*/(?!.*\.(jsonl?|gz|parquet)$)[\w.-]+")


def shipped_templates() -> dict[str, Path]:
    """The chat templates of configs/chat_templates by their names."""
    folder = shipped_folder("configs/chat_templates", "config/chat_templates", "qwen3.jinja")
    return {path.stem: path for path in sorted(folder.glob("*.jinja"))}


def existing_file(value: str, folder: Path, path: str, remedy: str = "") -> str:
    """The absolute path of a file, which must exist and not be empty; `path` names the field."""
    file = resolve(value, folder)
    try:
        found = os.stat(file)
    except OSError:
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        raise must(path, "be an existing file", file, remedy)
    if found.st_size == 0:
        raise must(path, "be a file that is not empty", file)
    return file


def resolve(value: str, folder: Path) -> str:
    """Makes a path absolute; a relative one starts at `folder`."""
    return os.path.realpath(os.path.join(folder, os.path.expanduser(value)))
