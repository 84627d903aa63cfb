"""Numbers that stand for sequences and for the micro-batches that they fill.

A search places millions of sequences. So a sequence is one number, which holds its rows and its
squared rows, and a sum of such numbers holds the sums of both. A micro-batch's number also has its
index between them: the least number is the lightest one, of equally light ones the first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from tlora_megatron.planner.rounds.spread import Part
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
