"""Fills the micro-batches of rounds with drawn lengths, by the rules of the real packer."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tlora_megatron.planner.rounds.load import ExpectedRounds
from tlora_megatron.planner.rounds.spread import Part
from tlora_megatron.planner.workload import JobLoad

_INDEX_BITS = 32
_INDICES = 2**_INDEX_BITS - 1
_MOST_ROWS = 2**62
"""Stands for room without end."""


def num_micro_batches(tokens: float, capacity: float, dp_size: int, pp_size: int) -> int:
    """Number of micro-batches of a round on every rank, as `training.packing` chooses it."""
    if pp_size == 1:
        return 1
    return min(max(math.ceil(tokens / (capacity * dp_size)), pp_size), 4 * pp_size)


class RoundShape(NamedTuple):
    """Bounds of a round."""

    capacity: float
    """Rows of a micro-batch."""
    dp_size: int
    pp_size: int
    fixed: int | None = None
    """Micro-batches of a replica; None = as many as the work needs."""

    def micro_batches(self, tokens: float) -> int:
        """Micro-batches of a replica for so many rows of all batches."""
        if self.fixed is not None:
            return self.fixed
        return num_micro_batches(tokens, self.capacity, self.dp_size, self.pp_size)

    @property
    def room(self) -> float:
        """The most rows of a round."""
        most = self.fixed or (4 * self.pp_size if self.pp_size > 1 else 1)
        return self.capacity * self.dp_size * most


def packed_rounds(packer: Packer, rounds: int) -> ExpectedRounds:
    """Fills so many rounds and returns what they hold."""
    for first_slot in range(rounds):
        packer.run_round(first_slot)
    return packer.result()


class Packer:
    """Packs rounds of drawn lengths and counts their rows."""

    def __init__(self, jobs: Sequence[JobLoad], shape: RoundShape) -> None:
        self._jobs, self._shape = jobs, shape
        self._capacity, self._dp_size = shape.capacity, shape.dp_size
        self._streams: list[Iterator[int]] = [
            job.lengths.shuffled(slot, job.batch_size) for slot, job in enumerate(jobs)
        ]
        self._left: list[list[int]] = [[] for _ in jobs]
        """The rest of every job's batch, ascending: the packer takes the longest sequence first."""
        self._waited = False
        """True if a batch had to be continued in the next round."""
        self._fullest: list[tuple[int, float]] = []
        self._bins: list[tuple[Part, ...]] = []
        self._tokens = [0] * len(jobs)
        self._sequences = [0] * len(jobs)

    def run_round(self, first_slot: int) -> None:
        """Fills the micro-batches of one round."""
        self._refill()
        rows = [sum(left) for left in self._left]
        held = [len(left) for left in self._left]
        count = self._shape.micro_batches(sum(rows))
        loads, squares = self._fill(count * self._dp_size, first_slot)
        for slot, left in enumerate(self._left):
            self._tokens[slot] += rows[slot] - sum(left)
            self._sequences[slot] += held[slot] - len(left)
        self._fullest.append((count, max(loads)))
        if self._dp_size > 1:
            self._bins.append(tuple(zip(loads, squares, strict=True)))
        self._waited = self._waited or any(self._left)

    def _refill(self) -> None:
        for slot, job in enumerate(self._jobs):
            if not self._left[slot]:
                batch = itertools.islice(self._streams[slot], job.batch_size)
                self._left[slot] = sorted(batch)

    def _fill(self, count: int, first_slot: int) -> tuple[list[int], list[int]]:
        """Puts sequences, job by job in turns, into the lightest of `count` bins, while they fit.

        Returns the bins' rows and squares. A search places millions of sequences: a bin is one
        number, its rows before its index.
        """
        bins, squares = list(range(count)), [0] * count
        capacity = min(self._capacity, _MOST_ROWS)
        turn, replace = deque(self._left), heapq.heapreplace
        turn.rotate(-first_slot)
        while turn:
            own = turn.popleft()
            lightest = bins[0]
            length = own[-1]
            if (lightest >> _INDEX_BITS) + length > capacity:
                continue
            own.pop()
            replace(bins, lightest + (length << _INDEX_BITS))
            squares[lightest & _INDICES] += length * length
            if own:
                turn.append(own)
        loads = [0] * count
        for filled in bins:
            loads[filled & _INDICES] = filled >> _INDEX_BITS
        return loads, squares

    def result(self) -> ExpectedRounds:
        """Means over the rounds so far."""
        rounds = len(self._fullest)
        tokens, sequences = (
            tuple(value / rounds for value in values) for values in (self._tokens, self._sequences)
        )
        drawn = 1.0
        if not self._waited:
            # Whole batches, whose expected rows are known; the lengths drawn are an accident.
            expected = tuple(
                n * job.lengths.mean for n, job in zip(sequences, self._jobs, strict=True)
            )
            drawn, tokens = sum(tokens) / sum(expected), expected
        # Not counted: a large batch may take more rounds than were looked at.
        steps = tuple(n / job.batch_size for n, job in zip(sequences, self._jobs, strict=True))
        return ExpectedRounds(
            tuple(self._fullest), tokens, sequences, steps, drawn, tuple(self._bins)
        )
