"""The spread of a round over its replicas: who is waited for, and how long."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Part = tuple[float, float]
"""Rows of a replica's sequences in a round, and the sum of their squares."""


class _Envelope(NamedTuple):
    """Sums over rounds of the slowest replica's rows and squares, for every curvature."""

    curvatures: tuple[float, ...]
    """Where some round's slowest replica becomes another one, ascending."""
    sums: tuple[Part, ...]
    """Below the first of them, and from each on."""
    most_squares: float
    """Sum over rounds of the most squares."""

    def at(self, curvature: float) -> Part:
        """Rows and squares of the slowest replicas."""
        return self.sums[bisect_right(self.curvatures, curvature)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSpread:
    """The replicas that may be the slowest of each round.

    A replica's time is taken as `rows + curvature * squares`, in units of a row without attention.
    """

    slowest: tuple[tuple[Part, ...], ...]
    """By round, the parts of which one is the slowest for any curvature."""
    rows: float
    """Mean of a replica, like the next."""
    squares: float
    charged: float | None
    """Mean over rounds of the rows whose time is counted for every replica: the fullest one's, or
    the mean one's; None = the mean replica's own time, where all rows are computed, filled or
    not."""
    same_rows: float | None = None
    """Rows that every replica takes time for, since a pipeline pads its micro-batches; None = each
    replica has its own."""
    _envelope: _Envelope = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_envelope", _envelope_of(self.slowest))

    def slowest_rows(self, curvature: float) -> float:
        """Mean over rounds of the slowest replica's time, in rows."""
        same, count = self.same_rows, len(self.slowest)
        if same is not None:
            return same + curvature * self._envelope.most_squares / count
        rows, squares = self._envelope.at(curvature)
        return (rows + curvature * squares) / count

    def mean_rows(self, curvature: float) -> float:
        """Mean over rounds and replicas of a replica's time, in rows."""
        return (self.same_rows or self.rows) + curvature * self.squares

    def charged_rows(self, curvature: float) -> float:
        """Time, in rows, that is counted for every replica, as if all had the same sequences."""
        if self.charged is None:
            return self.mean_rows(curvature)
        per_row = self.squares / self.rows if self.rows else 0.0
        return self.charged * (1 + curvature * per_row)

    def busy_share(self, curvature: float) -> float:
        """Share of the replicas' time in which they compute, instead of waiting for the slowest."""
        slowest = self.slowest_rows(curvature)
        return min(1.0, self.mean_rows(curvature) / slowest) if slowest > 0 else 1.0


def spread_of(
    rounds: Iterable[Sequence[Part]],
    *,
    is_padded: float | None = None,
    charges_mean: bool = False,
) -> ReplicaSpread:
    """The spread of rounds, each given as the parts of all replicas.

    Args:
        is_padded: rows that a pipeline's replica takes time for; None = no pipeline.
        charges_mean: True if the mean replica's time is counted, not the fullest one's.
    """
    hulls, rows, squares, count, fullest = [], 0.0, 0.0, 0, 0.0
    for parts in rounds:
        hulls.append(_upper_hull(parts))
        rows += sum(part[0] for part in parts)
        squares += sum(part[1] for part in parts)
        count += len(parts)
        fullest += max(part[0] for part in parts)
    charged = rows / count if charges_mean else fullest / len(hulls)
    return ReplicaSpread(
        slowest=tuple(hulls),
        rows=rows / count,
        squares=squares / count,
        charged=charged if is_padded is None else is_padded,
        same_rows=is_padded,
    )


def _envelope_of(rounds: Sequence[Sequence[Part]]) -> _Envelope:
    """The sum over rounds of the greatest of the lines `rows + curvature * squares`."""
    rows = squares = most = 0.0
    turns: list[tuple[float, float, float]] = []
    for parts in rounds:
        lines: list[Part] = []
        begins: list[float] = []
        for line in sorted(parts, key=lambda part: (part[1], part[0])):
            while lines and (begin := _crossing(lines[-1], line)) <= begins[-1]:
                lines.pop()
                begins.pop()
            begins.append(begin if lines else 0.0)
            lines.append(line)
        rows, squares, most = rows + lines[0][0], squares + lines[0][1], most + lines[-1][1]
        for (before, after), begin in zip(itertools.pairwise(lines), begins[1:], strict=True):
            turns.append((begin, after[0] - before[0], after[1] - before[1]))
    turns.sort()
    sums = [(rows, squares)]
    for _, more_rows, more_squares in turns:
        sums.append((sums[-1][0] + more_rows, sums[-1][1] + more_squares))
    return _Envelope(tuple(begin for begin, *_ in turns), tuple(sums), most)


def _crossing(flat: Part, steep: Part) -> float:
    """Curvature from which a part of at least as many squares is the slower one."""
    more = steep[1] - flat[1]
    return (flat[0] - steep[0]) / more if more else 0.0


def _upper_hull(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts that no other one exceeds in both rows and squares."""
    hull: list[Part] = []
    for part in sorted(set(parts), reverse=True):
        if not hull or part[1] > hull[-1][1]:
            hull.append(part)
    return tuple(hull)
