"""Fits a trace to a cluster: fewer jobs, fewer GPUs per job, arrivals at an offered load."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.sim.trace import Trace, TraceRow, offered_gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceShape:
    """Changes made to a trace before it is replayed, in this order."""

    only_completed: bool = False
    """Leave out jobs that failed or were cancelled in the trace. Otherwise their end is ignored:
    they held their GPUs as long as the trace says."""
    sample: float = 1.0
    """Share of the jobs to keep, drawn from the seed."""
    gpu_divisor: float = 1.0
    """Divisor of each job's GPUs; the result is rounded and at least 1."""
    oversize: Literal["skip", "clamp"] = "skip"
    """Jobs that ask for more GPUs than the cluster has: left out, or given all GPUs."""
    most_jobs: int | None = None
    """Number of jobs to keep, the first ones."""
    load: float | None = None
    """Offered load: arrivals are stretched or squeezed until the jobs, each alone, ask for so many
    times the GPU time that there is between the first and the last submission. None: as recorded.
    """

    def __post_init__(self) -> None:
        rules = (
            ("sample", "be in (0, 1]", self.sample, 0 < self.sample <= 1),
            ("gpu_divisor", "be at least 1", self.gpu_divisor, self.gpu_divisor >= 1),
            ("load", "be positive and finite", self.load, _may_be_load(self.load)),
            ("jobs", "be at least 1", self.most_jobs, self.most_jobs is None or self.most_jobs > 0),
        )
        for name, obligation, value, holds in rules:
            if not holds:
                raise must(f"--{name.replace('_', '-')}", obligation, value)


def _may_be_load(load: float | None) -> bool:
    return load is None or 0 < load < math.inf


def shaped(trace: Trace, shape: TraceShape, num_gpus: int, seed: int) -> Trace:
    """Shapes a trace for a cluster of `num_gpus` GPUs.

    Raises:
        ValueError: if no job is left, or a load is asked for of jobs that all come at once.
    """
    rng = Random(f"sample {seed}")
    dropped = Counter(trace.dropped)
    rows: list[TraceRow] = []
    for row in trace.rows:
        if shape.only_completed and row.end != "completed":
            dropped[f"{row.end} in the trace"] += 1
            continue
        if shape.sample < 1 and rng.random() >= shape.sample:
            dropped["not sampled"] += 1
            continue
        asked = max(1, round(row.num_gpus / shape.gpu_divisor))
        if asked > num_gpus and shape.oversize == "skip":
            dropped["more GPUs than the cluster has"] += 1
            continue
        rows.append(replace(row, num_gpus=min(asked, num_gpus)))
    kept = rows[: shape.most_jobs]
    if len(kept) < len(rows):
        dropped["after the first so many"] += len(rows) - len(kept)
    if not kept:
        raise ConfigError(
            f"--trace must keep at least one job, got none of {len(trace.rows)}; --sample, "
            "--only-completed, --oversize and --jobs leave jobs out"
        )
    first = kept[0].submit_s
    kept = [replace(row, submit_s=row.submit_s - first) for row in kept]
    if shape.load is not None:
        kept = _at_load(kept, shape.load, num_gpus)
    return Trace(name=trace.name, rows=tuple(kept), dropped=dict(sorted(dropped.items())))


def _at_load(rows: list[TraceRow], load: float, num_gpus: int) -> list[TraceRow]:
    recorded = offered_gpus(rows) / num_gpus
    if recorded == math.inf:
        raise must("--load", "be left out where all jobs come at once", load)
    faster = load / recorded
    return [replace(row, submit_s=row.submit_s / faster) for row in rows]
