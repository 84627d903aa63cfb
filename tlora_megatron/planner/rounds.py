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


def expected_round(
    jobs: Sequence[JobLoad],
    *,
    micro_batch_tokens: int,
    dp_size: int,
    pp_size: int,
    row_multiple: int,
) -> RoundLoad:
    """The mean round of a mix that trains on and on."""
    sequences = sum(job.batch_size for job in jobs)
    room = micro_batch_tokens * dp_size * 4 * pp_size
    fits = room / min(job.lengths.mean for job in jobs)
    if min(sequences, fits) > _MOST_SEQUENCES:
        return _fluid_round(jobs, micro_batch_tokens, dp_size, pp_size, row_multiple)
    queues = _Queues(jobs)
    totals = _Totals(len(jobs))
    rounds = min(max(_FEWEST_ROUNDS, _SIMULATED // sequences), _MOST_ROUNDS)
    if sum(job.batch_size * job.lengths.longest for job in jobs) <= micro_batch_tokens:
        rounds = min(rounds, 8)  # nothing waits, so that rounds differ by their lengths only
    for index in range(rounds):
        _run_round(queues, totals, index, micro_batch_tokens, dp_size, pp_size, row_multiple)
    return totals.mean(rounds)


def num_micro_batches(tokens: float, capacity: int, dp_size: int, pp_size: int) -> int:
    """Micro-batches of a round on every rank; see `training.packing.choose_num_micro_batches`."""
    if pp_size == 1:
        return 1
    return min(max(math.ceil(tokens / (capacity * dp_size)), pp_size), 4 * pp_size)


class _Queues:
    """What is left of every job's batch; longest first, as the packer takes them."""

    def __init__(self, jobs: Sequence[JobLoad]) -> None:
        self._jobs = jobs
        self._streams: list[Iterator[int]] = [job.lengths.spread() for job in jobs]
        self.left: list[list[int]] = [[] for _ in jobs]

    def refill(self) -> None:
        for slot, job in enumerate(self._jobs):
            if not self.left[slot]:
                batch = itertools.islice(self._streams[slot], job.batch_size)
                self.left[slot] = sorted(batch)  # taken from the end

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.left))


class _Totals:
    """Sums over rounds."""

    def __init__(self, num_jobs: int) -> None:
        self.micro_batches = 0
        self.rows = 0
        self.tokens = [0] * num_jobs
        self.sequences = [0] * num_jobs
        self.steps = [0] * num_jobs

    def mean(self, rounds: int) -> RoundLoad:
        def each(values: Sequence[int]) -> tuple[float, ...]:
            return tuple(value / rounds for value in values)

        return RoundLoad(
            micro_batches=self.micro_batches / rounds,
            rows=self.rows / self.micro_batches,
            job_tokens=each(self.tokens),
            job_sequences=each(self.sequences),
            steps=each(self.steps),
        )


def _run_round(
    queues: _Queues,
    totals: _Totals,
    first_slot: int,
    capacity: int,
    dp_size: int,
    pp_size: int,
    row_multiple: int,
) -> None:
    queues.refill()
    count = num_micro_batches(queues.tokens, capacity, dp_size, pp_size)
    bins = [(0, index) for index in range(count * dp_size)]
    slots = len(queues.left)
    open_slots = [(first_slot + turn) % slots for turn in range(slots)]
    while open_slots:
        for slot in list(open_slots):
            left = queues.left[slot]
            load, index = bins[0]
            if load + left[-1] > capacity:
                open_slots.remove(slot)
                continue
            length = left.pop()
            heapq.heapreplace(bins, (load + length, index))
            totals.tokens[slot] += length
            totals.sequences[slot] += 1
            if not left:
                totals.steps[slot] += 1
                open_slots.remove(slot)
    longest = max(load for load, _ in bins)
    totals.micro_batches += count
    totals.rows += count * _round_up(longest, row_multiple)


def _fluid_round(
    jobs: Sequence[JobLoad], capacity: int, dp_size: int, pp_size: int, row_multiple: int
) -> RoundLoad:
    """Large rounds: every job gets as many sequences, or its whole batch."""
    wanted = sum(job.batch_tokens for job in jobs)
    count = num_micro_batches(wanted, capacity, dp_size, pp_size)
    bins = count * dp_size
    share = _fair_share(jobs, min(wanted, _FLUID_FILL * capacity * bins))
    sequences = [min(float(job.batch_size), share) for job in jobs]
    tokens = [n * job.lengths.mean for n, job in zip(sequences, jobs, strict=True)]
    mean_length = sum(tokens) / sum(sequences)
    rows = min(capacity, sum(tokens) / bins + (mean_length / 2 if bins > 1 else 0))
    return RoundLoad(
        micro_batches=count,
        rows=_round_up(rows, row_multiple),
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
