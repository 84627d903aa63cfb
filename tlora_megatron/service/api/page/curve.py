"""A job's losses as a curve of few points, read from its metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

_MOST_BYTES = 4_000_000
"""Read of a long job's metrics: its last steps."""


class Point(NamedTuple):
    """One step of a curve."""

    step: int
    loss: float


def read_curve(path: Path, points: int) -> list[Point]:
    """Losses over steps, thinned by means over equal runs of steps; [] before the first step."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MOST_BYTES))
            lines = file.read(_MOST_BYTES).splitlines()
    except FileNotFoundError:
        return []
    steps = [point for line in lines if (point := _point(line)) is not None]
    return _thinned(steps, points)


def _point(line: bytes) -> Point | None:
    """The step of a line; None for evaluations, and for a line that is cut."""
    try:
        row = json.loads(line)
        return Point(int(row["step"]), float(row["loss"]))
    except (ValueError, KeyError, TypeError):
        return None


def _thinned(steps: list[Point], points: int) -> list[Point]:
    if len(steps) <= points:
        return steps
    size = -(-len(steps) // points)
    runs = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
    return [Point(run[-1].step, sum(p.loss for p in run) / len(run)) for run in runs]
