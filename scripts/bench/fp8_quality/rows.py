"""Rows of the quality of training over an FP8 base: curves of the loss, and where jobs ended."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRIDE = 5
"""Steps whose mean loss is a point of a curve."""
_LAST = 20
"""Steps whose mean is a job's last training loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRow:
    """Mean training loss of some steps; the fields are the CSV's columns."""

    base: str
    precision: str
    task: str
    seed: int
    step: int
    """The last of the steps."""
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRow:
    """The end of a job; the fields are the CSV's columns."""

    gpu: str
    versions: str
    commit: str
    base: str
    precision: str
    """The base's: `fp32`, `bf16` or `fp8`."""
    task: str
    seed: int
    steps: int
    train_loss: float
    """Mean of the last 20 steps."""
    eval_loss: float
    exact_match: float | str
    """Share of evaluation rows; empty where all of a row is learnt."""


def read_job(metrics: Path) -> tuple[list[float], dict[str, Any]]:
    """The losses of a job's steps, and its last evaluation."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluations = [record for record in records if "eval_loss" in record]
    return [r["loss"] for r in records if "loss" in r], evaluations[-1]


def curve(losses: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Points of a curve: the last of some steps, and their mean loss."""
    for begin in range(0, len(losses) - STRIDE + 1, STRIDE):
        yield begin + STRIDE, round(statistics.fmean(losses[begin : begin + STRIDE]), 5)


def last_loss(losses: Sequence[float]) -> float:
    """Mean of a job's last steps."""
    return round(statistics.fmean(losses[-_LAST:]), 5)


def compare(ends: Sequence[EndRow], curves: Sequence[CurveRow]) -> Iterator[str]:
    """A line a task: FP8 beside the wider base, means over seeds, and how seeds differ."""
    by_task: dict[str, dict[bool, list[EndRow]]] = defaultdict(lambda: defaultdict(list))
    for row in ends:
        by_task[row.task][row.precision == "fp8"].append(row)
    for task, sides in by_task.items():
        wide, fp8 = sides[False], sides[True]
        if not wide or not fp8:
            continue
        losses = [statistics.fmean(row.eval_loss for row in side) for side in (wide, fp8)]
        spread = statistics.pstdev([row.eval_loss for row in wide])
        line = f"{task:8} evaluation loss {losses[0]:.4f} -> {losses[1]:.4f} in FP8"
        line += f" (seeds differ by {spread:.4f}), curves {_distance(curves, task):.4f} apart"
        if all(row.exact_match != "" for row in (*wide, *fp8)):
            right = [100 * statistics.fmean(float(r.exact_match) for r in s) for s in (wide, fp8)]
            line += f", exact match {right[0]:.2f} -> {right[1]:.2f} % ({right[1] - right[0]:+.2f})"
        yield line


def _distance(curves: Sequence[CurveRow], task: str) -> float:
    """Mean distance of the curves of both bases with one seed."""
    points: dict[tuple[int, int], dict[bool, float]] = defaultdict(dict)
    for row in curves:
        if row.task == task:
            points[row.seed, row.step][row.precision == "fp8"] = row.loss
    pairs = [pair for pair in points.values() if len(pair) == 2]
    return statistics.fmean(abs(pair[True] - pair[False]) for pair in pairs)
