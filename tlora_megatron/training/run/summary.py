"""The content of `OUT/summary.json`."""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from tlora_megatron import timeline
from tlora_megatron.config.schema import JobError
from tlora_megatron.training.loop import Loop


def summarize(
    loop: Loop, rejected: Sequence[JobError], nano_batches: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns plain values about the run and every job; on the writer, of the first replica."""
    groups = loop.super_model.groups
    jobs = {job.name: loop.files.summary(job) for job in loop.jobs}
    for error in rejected:
        jobs[error.name] = {"status": "rejected", "reason": error.message}
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    layout = replace(groups.layout, stage_linears=None)
    sizes = {key: value for key, value in asdict(layout).items() if value is not None}
    deployment = groups.deployment
    return {
        "run": {
            "tokens_per_s": loop.tokens_per_s if loop.rounds else None,
            "world_size": dist.get_world_size(),
            "layout": sizes,
            "replicas": None if deployment is None else str(deployment),
            "rounds": loop.rounds,
            "stopped": signal.Signals(loop.stopped_by).name if loop.stopped_by else None,
            "stop_sentence": loop.stop_sentence,
            "nano_batches": nano_batches,
            "balance": _balance(loop),
            "train_time_s": loop.train_time_s,
            "saving": asdict(loop.saver.times),
            **run_times(),
            "peak_memory_bytes": peak,
            "device": torch.cuda.get_device_name() if peak is not None else platform.machine(),
            "versions": versions(),
        },
        "jobs": jobs,
    }


def run_times() -> dict[str, Any]:
    """Returns the seconds since the user's command began, in all and by what they were spent on."""
    times = timeline.process_timeline().seconds()
    return {"wall_time_s": sum(times.values()), "time_s": times}


def summarize_nano_batches(loop: Loop) -> dict[str, Any] | None:
    """Says how many nano-batches were asked for, chosen and run; call it before the engine closes.

    None for an engine that has no nano-batches.
    """
    model, rounds = loop.super_model, loop.nano_rounds
    switch = model.engine.nano_batches
    if switch is None:
        return None
    chosen = {"controller": None, "time_over_one": None} if rounds is None else rounds.summary()
    ran = {str(number): count for number, count in sorted(model.nano_batches_run.items())}
    asked = loop.settings.nano_batches
    return {"asked": asked, "count": switch.count, **chosen, "ran": ran}


def _balance(loop: Loop) -> dict[str, Any] | None:
    """Says how rounds were shared out among replicas; None where one runs alone."""
    model = loop.super_model
    timing, rule, correction = model.timing, model.rule, model.correction
    if timing is None:
        return None
    over = correction.over_predicted if timing.in_seconds and correction is not None else None
    found: dict[str, Any] = {
        "round_depth": timing.depth,
        "shared_out_by": "tokens" if rule is None else "predicted time",
        "depth": 1 if rule is None else rule.depth,
        "predicted_busy_share": model.busy.share,
        "speeds_from": timing.source,
        "measured_over_predicted": over,
    }
    if timing.cp_rates is not None:
        ran = sorted(model.cp_sizes_run.items())
        found["micro_batches_by_cp_size"] = {str(size): count for size, count in ran}
    return found


def versions() -> dict[str, str]:
    """Returns the versions of Python and the packages that results depend on."""
    names = (
        "tlora-megatron",
        "torch",
        "megatron-core",
        "transformer-engine",
        "deepspeed",
        "transformers",
    )
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    # A checkout of Megatron-LM is imported in the place of the installed package.
    if core := sys.modules.get("megatron.core"):
        found["megatron-core"] = core.__version__
    return found
