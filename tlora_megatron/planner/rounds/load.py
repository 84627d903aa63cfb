"""The load of a round, the rounds that it is the mean of, and numbers that stand for sequences.

A search places millions of sequences. So a sequence is one number, which holds its rows and its
squared rows, and a sum of such numbers holds the sums of both. A micro-batch's number also has its
index between them: the least number is the lightest one, of equally light ones the first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tlora_megatron.planner.rounds.spread import Part, ReplicaSpread, spread_of
from tlora_megatron.planner.workload import JobLoad

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
    """Puts sequences into the lightest of some micro-batches until one does not fit.

    Args:
        order: sequences.
        count: number of micro-batches.
        room: the number that each must stay below.

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
    """Puts what jobs have left into the order of turns, in each of which a job has the next one.

    Args:
        left: positive numbers of every job.
        first_slot: the job that has the first turn, counted on around all jobs.
    """
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


class Interned:
    """Gives equal tuples one identity, by which sums over them are kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[float, ...], tuple[float, ...]] = {}

    def of(self, row: tuple[float, ...]) -> tuple[float, ...]:
        """The first tuple that was equal to this one."""
        return self._known.setdefault(row, row)


def round_up(rows: float, multiple: int) -> int:
    """Rows of a micro-batch with its padding."""
    return max(1, math.ceil(rows / multiple)) * multiple
