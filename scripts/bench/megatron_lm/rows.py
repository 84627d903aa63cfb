"""Rows of Megatron-LM's layouts: the losses of a run beside the oracle's, and the CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.bench.harness.rows import write_rows
from scripts.bench.megatron_lm.cases import LIMITS, Layout
from tests.helpers.scenario import losses

Oracle = Mapping[str, Sequence[float]]
"""Training losses of each job, one a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One job of one layout; the fields are the CSV's columns."""

    gpu: str
    world: int
    versions: str
    commit: str
    megatron_lm: str
    layout: str
    precision: str
    job: str
    steps: int
    max_rel_loss_error: float


def largest_error(got: Sequence[float], alone: Sequence[float]) -> float:
    """Relative to the oracle's losses; infinite where there is none, or one that is no number."""
    errors = [abs(a - b) / abs(b) for a, b in zip(got, alone, strict=False)]
    return max((e if math.isfinite(e) else math.inf for e in errors), default=math.inf)


def compare(layout: Layout, out: Path, expected: Oracle, common: Mapping[str, str]) -> list[Row]:
    """A row for each job of a run that ended well."""
    rows = []
    for job, alone in expected.items():
        trained = (out / "jobs" / job / "metrics.jsonl").is_file()
        got = losses(out, job) if trained else []
        rows.append(
            Row(
                **common,
                world=layout.world,
                layout=layout.name,
                precision=layout.precision,
                job=job,
                steps=len(got),
                max_rel_loss_error=largest_error(got, alone),
            )
        )
    return rows


def verdicts(rows: Sequence[Row], expected: Oracle) -> list[str]:
    """Complaints about the losses of a run; empty if all are right."""
    found = []
    for row in rows:
        limit, num_steps = LIMITS[row.precision], len(expected[row.job])
        if row.steps != num_steps:
            found.append(f"{row.layout}: {row.job} took {row.steps} of {num_steps} steps")
        if row.max_rel_loss_error > limit:
            error = row.max_rel_loss_error
            found.append(f"{row.layout}: {row.job} is {error:.1e} off, at most {limit:.0e}")
    return found


def write(rows: Sequence[Row], path: Path) -> None:
    """Replaces the CSV."""
    written = [asdict(r) | {"max_rel_loss_error": f"{r.max_rel_loss_error:.2e}"} for r in rows]
    write_rows(path, written)
