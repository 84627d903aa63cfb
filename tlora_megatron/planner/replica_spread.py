"""The spread of a round over its replicas: who is waited for, and how long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Part = tuple[float, float]
"""Rows of a replica's sequences in a round, and the sum of their squares."""


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
    charged: float
    """Mean over rounds of the rows whose time is counted for every replica: the fullest one's, or
    the mean one's."""
    same_rows: float | None = None
    """Rows that every replica takes time for, since a pipeline pads its micro-batches; None = each
    replica has its own."""

    def slowest_rows(self, curvature: float) -> float:
        """Mean over rounds of the slowest replica's time, in rows."""
        same = self.same_rows
        if same is not None:
            squares = sum(max(part[1] for part in parts) for parts in self.slowest)
            return same + curvature * squares / len(self.slowest)
        times = (max(n + curvature * q for n, q in parts) for parts in self.slowest)
        return sum(times) / len(self.slowest)

    def mean_rows(self, curvature: float) -> float:
        """Mean over rounds and replicas of a replica's time, in rows."""
        return (self.same_rows or self.rows) + curvature * self.squares

    def charged_rows(self, curvature: float) -> float:
        """Time, in rows, that is counted for every replica, as if all had the same sequences."""
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


def _upper_hull(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts that no other one exceeds in both rows and squares."""
    hull: list[Part] = []
    for part in sorted(set(parts), reverse=True):
        if not hull or part[1] > hull[-1][1]:
            hull.append(part)
    return tuple(hull)
