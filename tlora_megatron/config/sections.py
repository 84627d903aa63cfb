"""Reads the sections of a configuration: `base_model`, `jobs`, and the key `parallel.replicas`.

A list of mappings, or the short form `1xCP8@65536 + 2xTP2+SP@12288/selective + 4xTP1@6144`: how
many, sizes joined by `+`, then `@` the tokens of a micro-batch and `/` what is recomputed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from tlora_megatron.config.documents import merge
from tlora_megatron.config.job import HF_TARGETS, JobSpec
from tlora_megatron.config.reader import ConfigError, check_partial, must, nearest, read_spec
from tlora_megatron.config.rules import (
    KNOWN_TARGETS,
    LEFT_OUT_IF_DRIVEN,
    check_job,
    existing_file,
    fill_driven,
    is_usable_name,
    resolve,
    resolve_job_paths,
)
from tlora_megatron.config.schema import (
    EMBEDDING,
    HEAD,
    BaseModelSpec,
    JobError,
    Recompute,
    ReplicaSpec,
)

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that are one GEMM."""


def read_base_model(raw: Any, folder: Path) -> BaseModelSpec:
    """Reads and checks the section, whose relative paths start at a folder; refuses a mistake."""
    if raw is None:
        raise ConfigError(
            "base_model must be given: {path: DIR}, or {config: FILE, random_init: true}"
        )
    if isinstance(raw, str):
        remedy = "names of bases are for services over HTTP; here give {path: DIR}, its folder"
        raise must("base_model", "be a mapping", raw, remedy)
    base = read_spec(BaseModelSpec, raw, "base_model")
    check_unquantised(base.unquantised)
    if (base.path is None) == (base.config is None):
        got = "neither" if base.path is None else "both"
        raise ConfigError(f"base_model must set exactly one of path and config, got {got}")
    if base.path is not None:
        if base.random_init:
            raise must("base_model.random_init", "be false with path", True, "give config instead")
        path = resolve(base.path, folder)
        if not Path(path).is_dir():
            remedy = "names on the Hugging Face hub are not downloaded: hf download NAME first"
            raise must("base_model.path", "be an existing directory", path, remedy)
        return replace(base, path=path)
    if not base.random_init:
        raise must("base_model.random_init", "be true with config", False, "or give path")
    config = existing_file(base.config or "", folder, "base_model.config")
    return replace(base, config=config)


def refuse_quantization(base: BaseModelSpec, where: str) -> None:
    """Refuses FP8 where a trainer of somebody else's, such as `DeepSpeed`, holds the base."""
    if base.quantization is not None:
        remedy = "`tlora train` has it; or delete the key"
        raise must("base_model.quantization", f"be null under {where}", base.quantization, remedy)


def ignored_base_settings(base: BaseModelSpec) -> list[str]:
    """One sentence for each setting of the base that has no effect."""
    found = []
    if base.seed and not base.random_init:
        found.append("base_model.seed has no effect without random_init")
    if base.quantization is None and set(base.unquantised) != {EMBEDDING, HEAD}:
        found.append("base_model.unquantised has no effect without quantization")
    return found


def check_unquantised(names: Sequence[str]) -> None:
    """Refuses an entry that names anything but a linear, or a part of one GEMM."""
    for name in (EMBEDDING, HEAD):
        if name not in names:
            rule = f"hold {name}, which has no FP8 kernels"
            raise must("base_model.unquantised", rule, list(names))
    for index, name in enumerate(names):
        head, target = _split(name)
        if (head is None and target in (EMBEDDING, HEAD)) or target in (None, *HF_TARGETS):
            continue
        valid = [EMBEDDING, HEAD, *HF_TARGETS]
        rule = f"be one of {', '.join(valid)}, layers.N or layers.N.TARGET"
        raise must(f"base_model.unquantised[{index}]", rule, name, nearest(target, valid))
    for layer in dict.fromkeys(_split(name)[0] for name in names):
        held = {target for name in names for at, target in [_split(name)] if at == layer}
        for fused in _FUSED:
            if held & set(fused) and not held >= set(fused):
                rule = f"name {', '.join(fused)} together: they are one GEMM"
                raise must("base_model.unquantised", rule, list(names))


def _split(name: str) -> tuple[int | None, str | None]:
    """The layer and the target that an entry names; None stands for all of them."""
    match = re.fullmatch(r"layers\.(\d+)(?:\.(.+))?", name)
    return (int(match[1]), match[2]) if match else (None, name)


def is_unquantised(names: Sequence[str], layer: int, target: str) -> bool:
    """True if the list leaves a linear of a layer as it is."""
    return any(_split(name) in ((None, target), (layer, target), (layer, None)) for name in names)


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
        folder: where relative paths start; None = they stay, and nothing looks where they lead.
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
    document: dict[str, Any] = plain(job)
    left_out = LEFT_OUT_IF_DRIVEN if job.driven else ()
    return {key: value for key, value in document.items() if key not in left_out}


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
        skip: leave jobs with mistakes out, and return their errors.
        settle: finishes a job that has been read; it gets the job's place, too.
        folder, targets, files_may_be_missing: as in `read_job`.

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
    # Always stops the run: which of the two keeps the name's output folder is not ours to choose.
    names = Counter(
        str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry
    )
    for name, count in names.items():
        if count > 1:
            raise ConfigError(f"jobs must have unique names, got {name!r} {count} times")
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


_SCALARS = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:
    """A spec or another value as JSON and YAML give it back: of mappings, lists and scalars."""
    if type(value) in _SCALARS:  # by far the most
        return value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    names = getattr(value, "__dataclass_fields__", None)
    return value if names is None else {name: plain(getattr(value, name)) for name in names}


_EXAMPLE = "write 1xCP8@65536 + 2xTP2+SP@12288/selective + 4xTP1@6144"
_PART = re.compile(
    r"(?:(?P<count>\d+)\s*x\s*)?(?P<sizes>[A-Za-z0-9+]+)"
    r"(?:@(?P<tokens>\d+))?(?:/(?P<recompute>\w+))?"
)
_SIZES = {"TP": "tp_size", "PP": "pp_size", "CP": "cp_size"}


def expand_short_form(raw: Any, path: str) -> Any:
    """Returns a short form as the list of mappings that it stands for; all else as it is."""
    if not isinstance(raw, str):
        return raw
    # A `+` within a layout has no spaces around it and no count behind it.
    parts = re.split(r"\s+\+\s+|\s*\+\s*(?=\d+\s*x)", raw.strip())
    return [_expand(part, path) for part in parts]


def _expand(part: str, path: str) -> dict[str, Any]:
    match = _PART.fullmatch(part)
    if match is None:
        raise must(path, "be replicas like 2xTP2+SP@12288/selective", part, _EXAMPLE)
    found: dict[str, Any] = {"count": int(match["count"] or 1)}
    for text in match["sizes"].split("+"):
        size = re.fullmatch(r"([A-Za-z]+)(\d+)", text)
        value: int | bool = True
        if text.upper() == "SP":
            key = "sequence_parallel"
        elif size is not None and size[1].upper() in _SIZES:
            key, value = _SIZES[size[1].upper()], int(size[2])
        else:
            raise must(path, "name sizes as TPn, PPn, CPn or SP", text, _EXAMPLE)
        if key in found:
            raise ConfigError(f"{path} must name each size once, got {part}")
        found[key] = value
    if match["tokens"]:
        found["micro_batch_tokens"] = int(match["tokens"])
    if match["recompute"]:
        if match["recompute"] not in get_args(Recompute):
            words = get_args(Recompute)
            rule_ = f"recompute one of {', '.join(words)}"
            raise must(path, rule_, match["recompute"], nearest(match["recompute"], words))
        found["recompute"] = match["recompute"]
    return found


def short_form(replicas: Sequence[ReplicaSpec]) -> str:
    """Returns the short form of replicas; `expand_short_form` reads the same ones from it."""
    return " + ".join(_short(spec) for spec in replicas)


def _short(spec: ReplicaSpec) -> str:
    sizes = [f"TP{spec.tp_size}"] if spec.tp_size > 1 else []
    sizes += ["SP"] if spec.sequence_parallel else []
    sizes += [f"PP{spec.pp_size}"] if spec.pp_size > 1 else []
    sizes += [f"CP{spec.cp_size}"] if spec.cp_size > 1 else []
    tokens = f"@{spec.micro_batch_tokens}" if spec.micro_batch_tokens is not None else ""
    recompute = f"/{spec.recompute}" if spec.recompute is not None else ""
    return f"{spec.count}x{'+'.join(sizes) or 'TP1'}{tokens}{recompute}"
