"""What a round of the super-model holds, in the mean: the packer's rules on expected lengths.

The rules are those of `training.packing`: a job puts at most the rest of its global batch into a
round, turns go sequence by sequence, the lightest micro-batch gets the next one, and all of a
round's micro-batches have as many rows as the fullest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tlora_megatron.planner.workload import JobLoad

_MOST_SEQUENCES = 512
"""A round of more is estimated as a fluid: single sequences no longer matter."""
_SIMULATED = 768
"""Sequences, about: rounds are repeated until so many were packed."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 4, 48
_FLUID_FILL = 0.97
"""Of the room that full micro-batches use where sequences are small beside it."""


@dataclass(frozen=True, slots=True)
class RoundLoad:
    """One round in the steady state; means over rounds."""

    micro_batches: float
    """On every data-parallel rank."""
    rows: float
    """Of a micro-batch of the rank with most, padding and all context-parallel ranks included."""
    job_tokens: tuple[float, ...]
    """Rows of each job in a round, over all ranks."""
    job_sequences: tuple[float, ...]
    steps: tuple[float, ...]
    """Optimizer steps of each job a round, at most 1."""

    @property
    def tokens(self) -> float:
        """Rows of all jobs in a round."""
        return sum(self.job_tokens)


@dataclass(frozen=True, slots=True)
class ExpectedRounds:
    """What the packer makes of a mix, before padding."""

    fullest: tuple[tuple[int, float], ...]
    """Micro-batches a rank, and rows of the fullest one, of every round looked at."""
    job_tokens: tuple[float, ...]
    job_sequences: tuple[float, ...]
    steps: tuple[float, ...]

    def load(self, row_multiple: int) -> RoundLoad:
        """The mean round with rows padded to a multiple."""
        count = sum(count for count, _ in self.fullest)
        rows = sum(count * _round_up(rows, row_multiple) for count, rows in self.fullest)
        return RoundLoad(
            micro_batches=count / len(self.fullest),
            rows=rows / count,
            job_tokens=self.job_tokens,
            job_sequences=self.job_sequences,
            steps=self.steps,
        )


def expected_rounds(
    jobs: Sequence[JobLoad], *, micro_batch_tokens: int, dp_size: int, pp_size: int
) -> ExpectedRounds:
    """The rounds of a mix that trains on and on."""
    sequences = sum(job.batch_size for job in jobs)
    room = micro_batch_tokens * dp_size * (4 * pp_size if pp_size > 1 else 1)
    fits = room / min(job.lengths.mean for job in jobs)
    if min(sequences, fits) > _MOST_SEQUENCES:
        return _fluid_round(jobs, micro_batch_tokens, dp_size, pp_size)
    packer = _Packer(jobs, micro_batch_tokens, dp_size, pp_size)
    rounds = min(max(_FEWEST_ROUNDS, _SIMULATED // int(min(sequences, fits) + 1)), _MOST_ROUNDS)
    rounds = max(rounds, len(jobs))  # every job has the first turn once
    for first_slot in range(rounds):
        packer.run_round(first_slot)
        if first_slot >= _FEWEST_ROUNDS and not packer.ever_waited:
            break  # all batches fit into every round, so that only lengths differ
    return packer.result()


def num_micro_batches(tokens: float, capacity: int, dp_size: int, pp_size: int) -> int:
    """Micro-batches of a round on every rank; see `training.packing.choose_num_micro_batches`."""
    if pp_size == 1:
        return 1
    return min(max(math.ceil(tokens / (capacity * dp_size)), pp_size), 4 * pp_size)


class _Packer:
    """Packs rounds of drawn lengths and counts what they hold."""

    def __init__(self, jobs: Sequence[JobLoad], capacity: int, dp_size: int, pp_size: int) -> None:
        self._jobs = jobs
        self._capacity, self._dp_size, self._pp_size = capacity, dp_size, pp_size
        self._streams: list[Iterator[int]] = [job.lengths.spread() for job in jobs]
        self._left: list[list[int]] = [[] for _ in jobs]
        """What is left of every job's batch, ascending: the packer takes the longest first."""
        self.ever_waited = False
        """Whether some batch had to go on in the next round."""
        self._fullest: list[tuple[int, float]] = []
        self._tokens = [0] * len(jobs)
        self._sequences = [0] * len(jobs)

    def run_round(self, first_slot: int) -> None:
        """Fills the micro-batches of one round."""
        self._refill()
        total = sum(map(sum, self._left))
        count = num_micro_batches(total, self._capacity, self._dp_size, self._pp_size)
        bins = [(0, index) for index in range(count * self._dp_size)]
        slots = len(self._jobs)
        open_slots = [(first_slot + turn) % slots for turn in range(slots)]
        while open_slots:
            open_slots = [slot for slot in open_slots if self._place(slot, bins)]
        self._fullest.append((count, max(load for load, _ in bins)))
        self.ever_waited = self.ever_waited or any(self._left)

    def _refill(self) -> None:
        for slot, job in enumerate(self._jobs):
            if not self._left[slot]:
                batch = itertools.islice(self._streams[slot], job.batch_size)
                self._left[slot] = sorted(batch)

    def _place(self, slot: int, bins: list[tuple[int, int]]) -> bool:
        """Puts one sequence into the lightest bin; whether the slot may go on."""
        left = self._left[slot]
        load, index = bins[0]
        if load + left[-1] > self._capacity:
            return False
        length = left.pop()
        heapq.heapreplace(bins, (load + length, index))
        self._tokens[slot] += length
        self._sequences[slot] += 1
        return bool(left)

    def result(self) -> ExpectedRounds:
        """Means over the rounds so far."""
        rounds = len(self._fullest)
        tokens, sequences = (
            tuple(value / rounds for value in values) for values in (self._tokens, self._sequences)
        )
        # Not counted: a large batch may take more rounds than were looked at.
        steps = tuple(n / job.batch_size for n, job in zip(sequences, self._jobs, strict=True))
        return ExpectedRounds(tuple(self._fullest), tokens, sequences, steps)


def _fluid_round(
    jobs: Sequence[JobLoad], capacity: int, dp_size: int, pp_size: int
) -> ExpectedRounds:
    """Large rounds: every job gets as many sequences, or its whole batch."""
    wanted = sum(job.batch_tokens for job in jobs)
    count = num_micro_batches(wanted, capacity, dp_size, pp_size)
    bins = count * dp_size
    share = _fair_share(jobs, min(wanted, _FLUID_FILL * capacity * bins))
    sequences = [min(float(job.batch_size), share) for job in jobs]
    tokens = [n * job.lengths.mean for n, job in zip(sequences, jobs, strict=True)]
    mean_length = sum(tokens) / sum(sequences)
    rows = min(capacity, sum(tokens) / bins + (mean_length / 2 if bins > 1 else 0))
    return ExpectedRounds(
        fullest=((count, rows),),
        job_tokens=tuple(tokens),
        job_sequences=tuple(sequences),
        steps=tuple(n / job.batch_size for n, job in zip(sequences, jobs, strict=True)),
    )


def _fair_share(jobs: Sequence[JobLoad], tokens: float) -> float:
    """Sequences each job may put in so that all together have `tokens` rows."""
    rate = sum(job.lengths.mean for job in jobs)
    share, left = 0.0, tokens
    for job in sorted(jobs, key=lambda job: job.batch_size):
        step = min(job.batch_size - share, left / rate if rate > 0 else 0.0)
        share += step
        left -= step * rate
        rate -= job.lengths.mean
        if left <= 0:
            break
    return share


def _round_up(rows: float, multiple: int) -> int:
    return max(1, math.ceil(rows / multiple)) * multiple
