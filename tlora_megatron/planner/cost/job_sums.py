"""Sums over all jobs of a mix, kept: thousands of plans share loads, and loads their parts."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

_Row = tuple[float, ...]


class JobSums:
    """Computes each sum once.

    Tuples are known by identity, since to compare those of hundreds of jobs takes as long as to
    add them up. They are kept, so that none takes another's place in memory.
    """

    def __init__(self) -> None:
        self._dots: dict[tuple[int, int], tuple[float, _Row, _Row]] = {}
        self._parts: dict[tuple[int, float], tuple[list[float], _Row]] = {}
        self._any: dict[int, tuple[float, _Row]] = {}
        self._present: dict[tuple[int, float, int], tuple[float, _Row, _Row]] = {}

    def dot(self, load: _Row, values: _Row) -> float:
        """The sum of products, by job."""
        key = id(load), id(values)
        found = self._dots.get(key)
        if found is None:
            found = self._dots[key] = _dot(load, values), load, values
        return found[0]

    def present(self, sequences: _Row, bins: float, values: _Row) -> float:
        """The sum of jobs' values in the mean micro-batch.

        Args:
            sequences: of each job in a round.
            bins: micro-batches of the round; a job with fewer sequences is in as many of them.
            values: of each job.
        """
        key = id(sequences), bins, id(values)
        found = self._present.get(key)
        if found is None:
            total = _dot(self._shares(sequences, bins), values)
            found = self._present[key] = total, sequences, values
        return found[0]

    def any_of(self, shares: _Row) -> float:
        """The share of rounds in which something happens to some job.

        Args:
            shares: of rounds in which it happens to each; for jobs of the same share it happens in
                the same rounds, as their batches begin together, for others independently.
        """
        found = self._any.get(id(shares))
        if found is None:
            never = math.prod(1 - min(1.0, share) for share in {round(s, 3) for s in shares})
            found = self._any[id(shares)] = 1 - never, shares
        return found[0]

    def _shares(self, sequences: _Row, bins: float) -> list[float]:
        """The share of micro-batches in which each job is."""
        key = id(sequences), bins
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = [min(1.0, n / bins) for n in sequences], sequences
        return found[0]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    assert len(a) == len(b), "both have a value for every job"
    total: float = sum(map(operator.mul, a, b))
    return total
