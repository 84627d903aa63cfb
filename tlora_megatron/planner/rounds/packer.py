"""Fills the micro-batches of rounds with drawn lengths, by the rules of the real packer."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tlora_megatron.model.dispatch import ReplicaRate, admit, share_out, turns
from tlora_megatron.model.micro_batches import choose_num_micro_batches
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.rounds.load import (
    ROWS_BIT,
    DrawnBatches,
    ExpectedRounds,
    Part,
    RoundLoad,
    fill,
    in_order,
    in_turns,
    part_of,
    round_up,
    rows_of,
    spread_of,
)
from tlora_megatron.planner.workload import JobLoad

_MOST_ROWS = 2**62
"""Stands for room without end."""


class RoundShape(NamedTuple):
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
        return choose_num_micro_batches(tokens, self.capacity, self.dp_size, self.pp_size)

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

    def __init__(self, batches: DrawnBatches, shape: RoundShape) -> None:
        self._batches, self._shape, self._dp_size = batches, shape, shape.dp_size
        self._room = (int(min(shape.capacity, _MOST_ROWS)) + 1) << ROWS_BIT
        slots = range(len(batches.jobs))
        self._left: list[list[int]] = [[] for _ in slots]
        """The rest of every job's batch, as `DrawnBatches` gives it."""
        self._num_drawn = [0 for _ in slots]
        self._rows_left = 0
        """Rows of all of these."""
        self._waited = False
        """True if a batch had to be continued in the next round."""
        self._fullest: list[tuple[int, float]] = []
        self._bins: list[tuple[int, ...]] = []

    def run_round(self, first_slot: int) -> None:
        self._refill()
        count = self._shape.micro_batches(self._rows_left)
        bins = self._fill(count * self._dp_size, first_slot)
        self._rows_left -= rows_of(bins)
        self._fullest.append((count, part_of(max(bins))[0]))
        if self._dp_size > 1:
            self._bins.append(in_order(bins))
        self._waited = self._waited or self._rows_left > 0

    def _refill(self) -> None:
        batches, drawn, rows = self._batches, self._num_drawn, 0
        for slot, left in enumerate(self._left):
            if not left:
                self._left[slot] = batch = batches.batch(slot, drawn[slot])
                drawn[slot] += 1
                rows += sum(batch)
        self._rows_left += rows >> ROWS_BIT

    def _fill(self, count: int, first_slot: int) -> list[int]:
        """Puts sequences, job by job in turns, into the lightest of `count` bins, while they fit.

        A job ends with its first sequence that does not fit. Returns the bins in any order.
        """
        left, is_whole = self._left, not self._waited and first_slot + 1 == self._num_drawn[0]
        order = self._batches.turns(first_slot) if is_whole else in_turns(left, first_slot)
        bins, placed = fill(order, count, self._room)
        if placed == len(order):
            self._left = [[] for _ in left]
        else:
            taken = self._squeeze(bins, placed, first_slot % len(left))
            self._left = [own[count:] for own, count in zip(left, taken, strict=True)]
        return bins

    def _squeeze(self, bins: list[int], placed: int, first_slot: int) -> list[int]:
        """Places what fits behind the first sequence that does not; returns jobs' counts."""
        left, lengths = self._left, [len(own) for own in self._left]
        turn, slots = 0, [*range(first_slot, len(left)), *range(first_slot)]
        going = [slot for slot in slots if lengths[slot]]
        while len(going) <= placed:
            placed -= len(going)
            turn += 1
            going = [slot for slot in going if lengths[slot] > turn]
        taken = [min(length, turn) for length in lengths]
        again, going = going[:placed], going[placed:]
        for slot in again:
            taken[slot] += 1
        while going:
            for slot in going:
                filled = bins[0] + left[slot][turn]
                if filled < self._room:
                    heapq.heapreplace(bins, filled)
                    taken[slot] += 1
                    again.append(slot)
            turn += 1
            going, again = [slot for slot in again if lengths[slot] > turn], []
        return taken

    def result(self) -> ExpectedRounds:
        """Means over the rounds so far."""
        rounds, jobs, batches = len(self._fullest), self._batches.jobs, self._batches
        counts = list(enumerate(self._num_drawn))
        rest = [part_of(sum(left))[0] for left in self._left]
        tokens = tuple((batches.rows(slot, count) - rest[slot]) / rounds for slot, count in counts)
        sequences = tuple(
            (count * jobs[slot].batch_size - len(self._left[slot])) / rounds
            for slot, count in counts
        )
        drawn = 1.0
        if not self._waited:
            # Whole batches, whose expected rows are known; the lengths drawn are an accident.
            expected = tuple(n * job.lengths.mean for n, job in zip(sequences, jobs, strict=True))
            drawn, tokens = sum(tokens) / sum(expected), expected
        # Not counted: a large batch may take more rounds than were looked at.
        steps = tuple(n / job.batch_size for n, job in zip(sequences, jobs, strict=True))
        return ExpectedRounds(
            tuple(self._fullest), tokens, sequences, steps, drawn, tuple(self._bins)
        )


_SEQUENCES = 4096
_FEWEST_ROUNDS, _MOST_ROUNDS = 12, 64
_UNIT = 10**9
"""Whole numbers that stand for a row without attention."""


def timed_load(
    jobs: Sequence[JobLoad], plan: Plan, curvature: float, row_multiple: int
) -> RoundLoad:
    """Fills rounds of drawn lengths as a run of a plan with its `round_depth` does."""
    square, longest = round(curvature * _UNIT), plan.micro_batch_tokens
    rates = [ReplicaRate(token_ps=_UNIT, square_ps=square, longest=longest)] * plan.dp_size
    tokens, sequences = [0] * len(jobs), [0] * len(jobs)
    rows: list[int] = []
    """Padded rows of every micro-batch of all rounds."""
    parts: list[list[Part]] = []
    for taken in drawn_rounds(jobs, rates, plan.round_depth):
        tokens = [n + sum(own) for n, own in zip(tokens, taken, strict=True)]
        sequences = [n + len(own) for n, own in zip(sequences, taken, strict=True)]
        lengths = [length for own in taken for length in own]
        parts.append([])
        for share in share_out(lengths, rates):
            padded = [round_up(sum(lengths[i] for i in places), row_multiple) for places in share]
            rows += padded
            parts[-1].append((sum(padded), sum(lengths[i] ** 2 for own in share for i in own)))
        if len(parts) >= _FEWEST_ROUNDS and (
            len(parts) >= _MOST_ROUNDS or sum(sequences) >= _SEQUENCES
        ):
            break
    # Means over the rounds; a micro-batch is that of the mean replica.
    rounds = len(parts)
    return RoundLoad(
        micro_batches=len(rows) / rounds / plan.dp_size,
        rows=sum(rows) / len(rows),
        job_tokens=tuple(n / rounds for n in tokens),
        job_sequences=tuple(n / rounds for n in sequences),
        steps=tuple(n / rounds / job.batch_size for n, job in zip(sequences, jobs, strict=True)),
        spread=spread_of(parts, charges_mean=True),
    )


def drawn_rounds(
    jobs: Sequence[JobLoad], rates: Sequence[ReplicaRate], depth: int
) -> Iterator[list[list[int]]]:
    """Rows of each job's sequences that the packer admits to one round after the other."""
    rooms = [rate.longest for rate in rates] * depth
    streams = [job.lengths.shuffled(slot, job.batch_size) for slot, job in enumerate(jobs)]
    left: list[list[int]] = [[] for _ in jobs]
    for first_slot in itertools.count():
        for slot, job in enumerate(jobs):
            batch = left[slot] or list(itertools.islice(streams[slot], job.batch_size))
            left[slot] = [batch[i] for i in turns(batch, rates)]
        counts = admit(left, first_slot=first_slot, rooms=rooms)
        yield [own[:count] for own, count in zip(left, counts, strict=True)]
        left = [own[count:] for own, count in zip(left, counts, strict=True)]
