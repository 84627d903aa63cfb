"""Writes a study's results as JSON and CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from tlora_megatron.sim.metrics import Summary
from tlora_megatron.sim.study import PolicyRun, Study, Yardsticks

Row = dict[str, str | int | float | None]
"""One line of a CSV file, by column."""

_JSON_KEYS = (
    "mean_jct_s",
    "p50_jct_s",
    "p95_jct_s",
    "p99_jct_s",
    "makespan_s",
    "throughput_tokens_per_s",
    "gpu_utilisation",
    "max_slowdown",
    "jobs_finished",
)
_JOB_COLUMNS = (
    *("policy", "job", "tenant", "num_gpus", "submit_s", "start_s", "end_s", "status"),
    *("isolated_s", "jct_s", "slowdown", "max_slowdown"),
)


def as_document(
    study: Study, runs: Sequence[PolicyRun], yardsticks: Yardsticks | None
) -> dict[str, object]:
    """The document that `tlora simulate --json` prints."""
    return {
        "trace": study.trace.name,
        "cluster": study.cluster.name,
        "load": study.load if math.isfinite(study.load) else None,
        "seed": study.options.seed,
        "policies": {
            run.policy: {key: getattr(run.summary, key) for key in _JSON_KEYS}
            | {"wall_s": run.wall_s}
            for run in runs
        },
        "yardsticks": None if yardsticks is None else asdict(yardsticks),
    }


def summary_rows(
    study: Study, runs: Sequence[PolicyRun], yardsticks: Yardsticks | None
) -> list[Row]:
    """One row per policy with all numbers of its summary; equal runs give equal rows."""
    about: Row = {
        "trace": study.trace.name,
        "cluster": study.cluster.name,
        "profile": study.profile.name,
        "mix": study.mix.name,
        "jobs": len(study.workload.jobs),
        "load": round(study.load, 4),
        "offered_load": round(study.offered_load, 4),
        "seed": study.options.seed,
    }
    held_against: Row = dict.fromkeys(field.name for field in fields(Yardsticks))
    if yardsticks is not None:
        held_against = _rounded(yardsticks)
    return [about | {"policy": run.policy} | _rounded(run.summary) | held_against for run in runs]


def _rounded(numbers: Summary | Yardsticks) -> Row:
    return {field.name: _plain(getattr(numbers, field.name)) for field in fields(numbers)}


def write_csv(path: str | Path, rows: Sequence[Row]) -> None:
    """Writes rows, all with the same columns, to a CSV file."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def job_rows(runs: Sequence[PolicyRun]) -> list[Row]:
    """One row per policy and job, in the order in which jobs ended."""
    rows = []
    for run in runs:
        for record in run.ledger.records:
            job = record.job
            values = (
                *(run.policy, job.name, job.tenant, job.num_gpus, job.submit_s, record.start_s),
                *(record.end_s, record.status, job.isolated_s, record.jct_s, record.slowdown),
                job.max_slowdown,
            )
            rows.append(dict(zip(_JOB_COLUMNS, map(_plain, values), strict=True)))
    return rows


def _plain(value: str | int | float | None) -> str | int | float | None:
    return round(value, 6) if isinstance(value, float) else value
