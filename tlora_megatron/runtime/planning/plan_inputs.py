"""The planner's view of a configured run: its model, its jobs' lengths, the fastest plan.

Lengths come from the jobs' data through the base's tokenizer. That takes a while the first time, so
they are kept in the user's cache directory. An option gives lengths for planning without data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tlora_megatron.config.job import JobSpec, files_in
from tlora_megatron.config.reader import must
from tlora_megatron.config.schema import BaseModelSpec, RunConfig
from tlora_megatron.files import read_object, write_atomic
from tlora_megatron.model.backbone import check_block_sizes, over_base
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.advice import advise
from tlora_megatron.planner.deploy import RankedDeployment, deploy
from tlora_megatron.planner.hardware import (
    HardwareProfile,
    find_profile,
    profiles_in,
    shipped_profiles,
)
from tlora_megatron.planner.layouts import Question, SearchSpace
from tlora_megatron.planner.search import RankedPlan, search
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

logger = logging.getLogger(__name__)

_NAMED = 4
"""Jobs that a sentence names; further ones are counted."""


def _tell_cuts(jobs: Iterable[JobSpec], lengths: LengthHistogram) -> None:
    """Warns of the cuts that given lengths need, one for each max_seq_len.

    Args:
        lengths: rows, one less than tokens.

    Raises:
        ConfigError: for a job whose `data.overlong` is error, as training does.
    """
    names: dict[int, list[str]] = {}
    for job in jobs:
        if lengths.longest < job.max_seq_len:
            continue
        if job.data.overlong == "error":
            raise must(
                "--lengths",
                f"be at most max_seq_len {job.max_seq_len} of job {job.name!r}, whose "
                "data.overlong is error",
                lengths.longest + 1,
                "raise max_seq_len, or set data.overlong: truncate to have the ends cut",
            )
        names.setdefault(job.max_seq_len, []).append(job.name)
    tokens = [(rows + 1, share) for rows, share in lengths.pairs]
    for limit, own in sorted(names.items()):
        named = ", ".join(own[:_NAMED])
        named += f" and {len(own) - _NAMED} more" if len(own) > _NAMED else ""
        lost = sum((length - limit) * share for length, share in tokens if length > limit)
        logger.warning(
            "--lengths: max_seq_len %d of job%s %s cuts %.2f%% of the sequences and loses %.2f%% "
            "of all tokens, as training will; the plan is for what is left. Raise max_seq_len to "
            "%d, or give the lengths after the cut",
            limit,
            "s" if len(own) > 1 else "",
            named,
            100 * sum(share for length, share in tokens if length > limit),
            100 * lost / sum(length * share for length, share in tokens),
            lengths.longest + 1,
        )


_FORMAT = 3
"""Version of the cached files' format, and of how rows are read."""


def base_shape(base: BaseModelSpec) -> ModelSpec:
    """The shape of a base model, with its linears that hold FP8 codes."""
    spec = read_model_spec(base.config_file)
    quantisation = base_quantisation(base, spec)
    if quantisation is None:
        return spec
    in_blocks = quantisation.kind == "block"
    return replace(spec, fp8_linears=quantisation.layers_by_linear, fp8_in_blocks=in_blocks)


def open_space(config: RunConfig, **fixed: Any) -> SearchSpace:
    """What a configuration leaves open to a plan, less what else is fixed."""
    asked = config.parallel.lora_sharding
    portions = (job.portion_tokens for job in config.jobs if job.portion_tokens)
    configured = {
        "lora_sharding": None if asked == "auto" else asked,
        "largest_portion": max(portions, default=None),
        "shard_optimizer": config.parallel.shard_optimizer or None,
        "deterministic": config.run.deterministic or None,
    }
    return SearchSpace(**configured | fixed)


def plan_hardware(name: str) -> HardwareProfile:
    """Finds a profile by path, or by name in `_profile_folders`."""
    return find_profile(name, _profile_folders())


def _profile_folders() -> tuple[Path, Path]:
    """Folders of profiles: `configs/hardware` of the working folder, then of the project."""
    return Path.cwd() / "configs" / "hardware", shipped_profiles()


def profile_of_gpu(gpu: str) -> HardwareProfile | None:
    """Finds the profile of a kind of GPU; None if there is none.

    A measured profile is preferred to a data sheet's, then the working folder's to the project's.
    """
    found = (entry for folder in _profile_folders() for entry in profiles_in(folder))
    profiles = [profile for _, profile in found if profile.gpu == gpu]
    return min(profiles, key=lambda profile: profile.source != "measured", default=None)


def other_profiles(hardware: HardwareProfile) -> tuple[HardwareProfile, ...]:
    """The profiles that advice may name beside a run's own, with the run's dtype."""
    found = {
        path.stem: profile
        for folder in _profile_folders()[::-1]
        for path, profile in profiles_in(folder)
    }
    return tuple(
        replace(profile, name=name, dtype=hardware.dtype)
        for name, profile in sorted(found.items())
        if name != hardware.name and profile.gpu != "CPU"
        if profile.gpu != hardware.gpu or (hardware.inter_node is None and profile.inter_node)
    )


def run_hardware(name: str, config: RunConfig) -> HardwareProfile:
    """Like `plan_hardware`, but with the run's dtype, which memory depends on."""
    hardware, dtype = plan_hardware(name), config.base_model.dtype
    if hardware.dtype != dtype:
        logger.warning(
            "profile %s was measured in %s, the run is in %s: predicted memory counts that, "
            "predicted times do not",
            hardware.name,
            hardware.dtype,
            dtype,
        )
    return replace(hardware, dtype=dtype)


def parse_lengths(text: str) -> LengthHistogram:
    """Reads a histogram of sequence lengths from `512`, or with shares from `256:3,1024:1`."""
    pairs = []
    for part in text.split(","):
        tokens, _, count = part.partition(":")
        try:
            pairs.append((int(tokens), float(count) if count else 1.0))
        except ValueError:
            raise must("--lengths", "be like 512 or 256:3,1024:1", text) from None
    if any(tokens < 2 for tokens, _ in pairs):
        raise must("--lengths", "hold sequences of at least 2 tokens", text)
    try:
        # A sequence takes a row less than it has tokens: the last is only predicted.
        return LengthHistogram.from_counts((tokens - 1, count) for tokens, count in pairs)
    except ValueError as error:
        raise must("--lengths", "be like 512 or 256:3,1024:1", text, str(error)) from None


def plan_jobs(config: RunConfig, spec: ModelSpec, lengths: LengthHistogram | None) -> list[JobLoad]:
    """The loads of all jobs.

    Args:
        lengths: lengths for all jobs, cut to each one's max_seq_len with a warning; None: read
            the jobs' data.

    Raises:
        ValueError: if data or tokenizer cannot be used, or adapters do not fit the model.
        ImportError: without transformers, which reads tokenizers.
    """
    jobs = [over_base(job, spec) for job in config.jobs]
    for job in jobs:
        check_block_sizes(job.name, job.lora, spec)
    if lengths is not None:
        _tell_cuts(config.jobs, lengths)
        clipped = [lengths.clipped(job.max_seq_len - 1) for job in config.jobs]
        return [JobLoad.from_spec(j, c) for j, c in zip(jobs, clipped, strict=True)]
    return [_job_load(job, spec, config.base_model.folder) for job in jobs]


def _job_load(job: JobSpec, spec: ModelSpec, tokenizer_dir: Path) -> JobLoad:
    for key, named in (("data.train", job.data.train), ("data.eval", job.data.eval)):
        for path in files_in(named):
            if not Path(path).is_file():
                remedy = "--lengths plans without the data"
                raise must(f"{key} of job {job.name!r}", "be an existing file", path, remedy)
    cached = _cache_file(job, tokenizer_dir)
    try:
        known = read_object(cached)
    except (OSError, ValueError):
        known = None
    if not known or not {"lengths", "target_share"} <= known.keys():
        known = _measure(job, spec, tokenizer_dir)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(cached, json.dumps(known), durable=False)
        except OSError as error:
            logger.debug("lengths are not kept: %s", error)
    elif any(known["cut"]):  # what has read the data has said so itself
        logger.warning(
            "job %r: %d sequences cut to max_seq_len %d, %d more dropped with no target left",
            job.name, known["cut"][0], job.max_seq_len, known["cut"][1],
        )  # fmt: skip
    pairs = tuple((int(length), float(share)) for length, share in known["lengths"])
    return JobLoad.from_spec(
        job, LengthHistogram(pairs), known["target_share"], known["longest_eval"]
    )


def _measure(job: JobSpec, spec: ModelSpec, tokenizer_dir: Path) -> dict[str, Any]:
    # Here, since they import numpy and transformers.
    from tlora_megatron.training.data.job_data import load_job_data
    from tlora_megatron.training.data.mapped_tokens import rows_of
    from tlora_megatron.training.data.tokenize import load_tokenizer

    data = load_job_data(job, load_tokenizer(tokenizer_dir), spec.vocab_size)
    rows = rows_of(data.train, job.num_sides).tolist()
    targets = sum(int(s.is_target.sum()) for s in data.train)
    histogram = LengthHistogram.from_lengths(rows)
    return {
        "lengths": histogram.pairs,
        "target_share": min(1.0, targets / sum(rows)),
        "cut": [data.num_truncated, data.num_dropped],
        "longest_eval": max((len(s.tokens) - 1 for s in data.eval), default=0),
    }


def _cache_file(job: JobSpec, tokenizer_dir: Path) -> Path:
    """The cache file of a job; its name is a hash of everything that the lengths depend on."""
    data = map(Path, (*job.data.files, job.data.chat_template or ""))
    files = [*data, *sorted(tokenizer_dir.glob("token*"))]
    files += sorted(tokenizer_dir.glob("vocab*")) + sorted(tokenizer_dir.glob("chat_template*"))
    stamps = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    what = json.dumps([_FORMAT, stamps, job.max_seq_len, job.num_sides, asdict(job.data)])
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (
        root / "tlora_megatron" / f"lengths-{hashlib.sha256(what.encode()).hexdigest()[:24]}.json"
    )


def best_plan(
    config: RunConfig,
    num_gpus: int,
    hardware: HardwareProfile,
    lengths: LengthHistogram | None = None,
) -> RankedPlan:
    """Returns the plan with which `tlora train` is fastest; the same one on every process.

    Raises:
        ValueError: if none fits, with changes that would help; or if jobs or data cannot be used.
    """
    spec = base_shape(config.base_model)
    jobs = plan_jobs(config, spec, lengths)
    space = open_space(config, runs_in="train")
    result = search(spec, jobs, hardware, num_gpus, space)
    if result.best is None:
        reasons = "; ".join(dropped.reason for dropped in result.dropped[:3])
        question = Question(spec, jobs, hardware, num_gpus, space)
        advice = advise(question, other_profiles(hardware))
        raise ValueError(
            f"--plan auto must find a plan that fits {num_gpus} x {hardware.gpu}, got none: "
            f"{reasons}. {advice}"
        )
    return result.best


def check_deployable(config: RunConfig) -> None:
    """Refuses configurations that unlike replicas cannot keep."""
    why = "with --replicas any"
    # Portions are dealt out by replicas' sizes, and what is chosen here rests on time alone.
    remedy = "leave --replicas any out, or name parallel.replicas yourself"
    if config.run.deterministic:
        raise must("run.deterministic", f"be false {why}", True, remedy)
    if config.parallel.shard_optimizer:
        raise must("parallel.shard_optimizer", f"be false {why}", True, "leave --replicas any out")
    if config.parallel.lora_sharding not in ("auto", "fold"):
        raise must(
            "parallel.lora_sharding", f"be auto or fold {why}", config.parallel.lora_sharding
        )
    for job in config.jobs:
        if job.portion_tokens is not None:
            name = f"portion_tokens of job {job.name}"
            raise must(name, f"be null {why}", job.portion_tokens, remedy)


def best_deployment(
    config: RunConfig,
    num_gpus: int,
    hardware: HardwareProfile,
    lengths: LengthHistogram | None = None,
) -> RankedDeployment:
    """Returns the deployment with which `tlora train` is fastest; the same one on every process.

    Raises:
        ValueError: if no replica holds the longest sequence, or for what cannot be used.
    """
    check_deployable(config)
    spec = base_shape(config.base_model)
    jobs = plan_jobs(config, spec, lengths)
    space = SearchSpace(runs_in="train")
    best = deploy(spec, jobs, hardware, num_gpus, space).best
    if best is None:
        longest = max(job.lengths.longest for job in jobs)
        question = Question(spec, jobs, hardware, num_gpus, space)
        advice = advise(question, other_profiles(hardware))
        raise ValueError(
            f"--replicas any must find replicas for sequences of {longest} tokens on {num_gpus} x "
            f"{hardware.gpu}, got none. Replicas alike: {advice}"
        )
    return best
