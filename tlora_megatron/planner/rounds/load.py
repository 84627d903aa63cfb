"""The load of a round, the rounds that it is the mean of, and its spread over replicas.

A search places millions of sequences. So a sequence is one number, which holds its rows and its
squared rows, and a sum of such numbers holds the sums of both. A micro-batch's number also has its
index between them: the least number is the lightest one, of equally light ones the first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tlora_megatron.planner.workload import JobLoad

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
    """The replicas that may be the slowest of each round, by `rows + curvature * squares`."""

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


_INDEX_BIT, ROWS_BIT = 64, 96
"""Where a number's index and its rows begin, behind the bits of the squared rows."""
_INDICES, _SQUARES = 2 ** (ROWS_BIT - _INDEX_BIT) - 1, 2**_INDEX_BIT - 1


def part_of(number: int) -> Part:
    """The rows and the squared rows of a number, or of a sum of numbers."""
    return number >> ROWS_BIT, number & _SQUARES


def in_order(bins: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches by their index."""
    ordered = [0] * len(bins)
    for number in bins:
        ordered[number >> _INDEX_BIT & _INDICES] = number
    return tuple(ordered)


def rows_of(bins: Sequence[int]) -> int:
    """Rows of all micro-batches of a round together."""
    count = len(bins)
    return (sum(bins) - (count * (count - 1) // 2 << _INDEX_BIT)) >> ROWS_BIT


def fill(order: Sequence[int], count: int, room: int) -> tuple[list[int], int]:
    """Puts sequences into the lightest of `count` micro-batches until one does not fit.

    Returns:
        The micro-batches as a heap, and the number of sequences placed.
    """
    # As long as some are empty, the first of these is the lightest.
    bins = [own + (index << _INDEX_BIT) for index, own in enumerate(order[:count])]
    placed = next((n for n, filled in enumerate(bins) if filled >= room), len(bins))
    bins[placed:] = [index << _INDEX_BIT for index in range(placed, count)]
    heapq.heapify(bins)
    if placed < count:
        return bins, placed
    exchange = heapq.heapreplace
    for own in itertools.islice(order, count, None):
        filled = bins[0] + own
        if filled >= room:
            break
        exchange(bins, filled)
        placed += 1
    return bins, placed


class DrawnBatches:
    """The batches that jobs draw one after another, once for all packers of a mix."""

    def __init__(self, jobs: Sequence[JobLoad]) -> None:
        self.jobs = tuple(jobs)
        self._streams = [job.lengths.shuffled(n, job.batch_size) for n, job in enumerate(jobs)]
        self._drawn: list[list[list[int]]] = [[] for _ in jobs]
        self._turns: dict[int, list[int]] = {}

    def batch(self, slot: int, number: int) -> list[int]:
        """A job's batch, descending: the packer takes the longest sequence first."""
        drawn = self._drawn[slot]
        while len(drawn) <= number:
            batch = itertools.islice(self._streams[slot], self.jobs[slot].batch_size)
            drawn.append([(n << ROWS_BIT) + n * n for n in sorted(batch, reverse=True)])
        return drawn[number]

    def rows(self, slot: int, count: int) -> int:
        """Rows of a job's first batches, which have been drawn."""
        return sum(map(sum, self._drawn[slot][:count])) >> ROWS_BIT

    def turns(self, number: int) -> list[int]:
        """All jobs' batches of a number in turns, of which the job of that number has the first."""
        if number not in self._turns:
            batches = [self.batch(slot, number) for slot in range(len(self.jobs))]
            self._turns[number] = in_turns(batches, number)
        return self._turns[number]


def in_turns(left: Sequence[Sequence[int]], first_slot: int) -> list[int]:
    """Puts what jobs have left into the order of turns, of which `first_slot` has the first."""
    first = first_slot % len(left)
    rounds = itertools.zip_longest(*left[first:], *left[:first])
    return list(filter(None, itertools.chain.from_iterable(rounds)))


_SIZES = 8
"""Number of groups into which rounds are divided by their rows."""


@dataclass(frozen=True, slots=True)
class RoundLoad:
    """The load of one round in the steady state; means over rounds."""

    micro_batches: float
    """Number of micro-batches on every data-parallel rank."""
    rows: float
    """Rows of a micro-batch on the rank with most, padded, over all context-parallel ranks."""
    job_tokens: tuple[float, ...]
    """Rows of each job in a round, over all ranks."""
    job_sequences: tuple[float, ...]
    steps: tuple[float, ...]
    """Optimizer steps of each job per round, at most 1."""
    sizes: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """Pairs of a share of the micro-batches and their rows relative to `rows`. If batches wait for
    room, some rounds hold little more than the rest of one batch."""
    spread: ReplicaSpread | None = None
    """The spread of the replicas' parts; None = all are alike."""
    filled: float | None = None
    """Rows of the mean micro-batch that jobs fill, where a trainer computes `rows` whatever there
    is; None = `rows` are what there is."""
    tokens: float = field(init=False, compare=False, repr=False)
    """Rows of all jobs in a round."""
    sequences: float = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", sum(self.job_tokens))
        object.__setattr__(self, "sequences", sum(self.job_sequences))

    @property
    def filled_share(self) -> float:
        """Share of the computed rows that jobs fill, padding to tiles aside."""
        return 1.0 if self.filled is None else self.filled / self.rows


@dataclass(frozen=True, slots=True)
class ExpectedRounds:
    """The rounds that the packer makes of a mix, before padding."""

    fullest: tuple[tuple[int, float], ...]
    """For every packed round, its micro-batches per rank and the rows of the fullest one."""
    job_tokens: tuple[float, ...]
    job_sequences: tuple[float, ...]
    steps: tuple[float, ...]
    drawn: float = 1.0
    """Rows of the packed rounds relative to the expected rows of as many sequences."""
    bins: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)
    """By round, all micro-batches as numbers (`bins.part_of`); `m * dp_size + d` is one of replica
    d."""

    def load(self, row_multiple: int) -> RoundLoad:
        """The mean round with rows padded to a multiple."""
        count = sum(count for count, _ in self.fullest)
        rows = sum(count * round_up(rows, row_multiple) for count, rows in self.fullest)
        return RoundLoad(
            micro_batches=count / len(self.fullest),
            rows=rows / count / self.drawn,
            job_tokens=self.job_tokens,
            job_sequences=self.job_sequences,
            steps=self.steps,
            sizes=self._sizes(row_multiple, rows / count),
        )

    def spread(self, dp_size: int) -> ReplicaSpread | None:
        """The spread of the parts of so many replicas."""
        if dp_size == 1 or not self.bins:
            return None
        depth = len(self.bins[0]) // dp_size
        if depth == 1:
            return spread_of(self.parts(dp_size))
        same = sum(count * rows for count, rows in self.fullest) / len(self.fullest)
        return spread_of(self.parts(dp_size), is_padded=same)

    def full_spread(self, dp_size: int, rows: float) -> ReplicaSpread:
        """The spread of replicas that all compute `rows` rows a round, filled or not."""
        return replace(spread_of(self.parts(dp_size), is_padded=rows), charged=None)

    def parts(self, dp_size: int) -> Iterator[list[Part]]:
        """By round, each replica's rows and squares."""
        for bins in self.bins:
            if len(bins) == dp_size:
                yield [part_of(number) for number in bins]
            else:
                yield [part_of(sum(bins[d::dp_size])) for d in range(dp_size)]

    def _sizes(self, row_multiple: int, mean: float) -> tuple[tuple[float, float], ...]:
        """Divides rounds into groups of about equal size, the smallest rounds first."""
        if len(set(self.fullest)) == 1:
            return ((1.0, 1.0),)
        ordered = sorted((round_up(rows, row_multiple), count) for count, rows in self.fullest)
        total = sum(count for _, count in ordered)
        bounds = [len(ordered) * i // _SIZES for i in range(_SIZES + 1)]
        groups = (ordered[begin:end] for begin, end in itertools.pairwise(bounds))
        return tuple(
            (members / total, sum(rows * count for rows, count in group) / members / mean)
            for group in groups
            if (members := sum(count for _, count in group))
        )


def round_up(rows: float, multiple: int) -> int:
    """Rows of a micro-batch with its padding."""
    return max(1, math.ceil(rows / multiple)) * multiple
