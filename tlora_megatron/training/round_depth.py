"""Chooses how deep the rounds of a mix of jobs are, from the lengths of their sequences alone.

A deeper round shares out better among replicas, but a job with a small batch steps once a round, so
depth is paid by small jobs. Rounds get deeper only where all jobs together gain 5 % by it, or where
the smallest job loses no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.model.dispatch import admit, predicted_ends_ps, share_out, turns

DEPTHS = (1, 2, 4)
"""Depths that are compared."""
ENOUGH = 0.97
"""Busy share at which deeper rounds are not looked for."""
WORTH = 1.05
"""Factor of speed that is worth any loss of the smallest job, and a loss that any gain is worth."""
_SEQUENCES = 4096
"""Sequences of the rounds that are looked at, about."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 64

Batches = Callable[[int], Sequence[int]]
"""From the number of a job's batch to the rows of its sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Prediction for the rounds of a mix at one depth."""

    depth: int
    busy_share: float
    """Share of the replicas' time in which they compute, instead of waiting for the slowest."""
    smallest_speed: float
    """Rows of the job with the smallest batch for each picosecond."""


def choose_depth(jobs: Sequence[Batches], rates: Sequence[ReplicaRate]) -> list[Outlook]:
    """Compares the rounds of a mix at several depths, the chosen one last.

    Args:
        jobs: at least one.
    """
    outlooks = [outlook(jobs, rates, DEPTHS[0])]
    for depth in DEPTHS[1:]:
        before = outlooks[-1]
        if before.busy_share >= ENOUGH:
            break
        deeper = outlook(jobs, rates, depth)
        gain = deeper.busy_share / before.busy_share
        loss = before.smallest_speed / deeper.smallest_speed
        if gain <= 1.0 or (gain < WORTH and loss > WORTH):
            break
        outlooks.append(deeper)
    return outlooks


def outlook(jobs: Sequence[Batches], rates: Sequence[ReplicaRate], depth: int) -> Outlook:
    """Predicts rounds of one depth from the first batches of every job."""
    rounds = TimedQueues(jobs, rates, depth)
    number = sequences = busy_ps = time_ps = smallest_rows = 0
    smallest = min(range(len(jobs)), key=lambda slot: sum(jobs[slot](0)))
    while number < _FEWEST_ROUNDS or (number < _MOST_ROUNDS and sequences < _SEQUENCES):
        taken = rounds.next_round(number)
        lengths = [rows for own in taken for rows in own]
        shares = [
            [[lengths[i] for i in part] for part in share] for share in share_out(lengths, rates)
        ]
        ends = predicted_ends_ps(shares, rates)
        busy_ps, time_ps = busy_ps + sum(ends), time_ps + max(ends)
        smallest_rows += sum(taken[smallest])
        sequences += sum(map(len, taken))
        number += 1
    return Outlook(
        depth=depth,
        busy_share=busy_ps / (time_ps * len(rates)),
        smallest_speed=smallest_rows / time_ps,
    )


class TimedQueues:
    """Rows of sequences that wait for rounds by time, a batch of every job after the other."""

    def __init__(self, jobs: Sequence[Batches], rates: Iterable[ReplicaRate], depth: int) -> None:
        self._jobs = jobs
        self._rates = tuple(rates)
        self._rooms = [rate.longest for rate in self._rates] * depth
        self._left: list[list[int]] = [[] for _ in jobs]
        self._begun = [0] * len(jobs)

    def next_round(self, first_slot: int) -> list[list[int]]:
        """Takes a round: the rows of each slot's sequences in it."""
        for slot, batches in enumerate(self._jobs):
            if not self._left[slot]:
                self._left[slot] = list(batches(self._begun[slot]))
                self._begun[slot] += 1
            left = self._left[slot]
            self._left[slot] = [left[i] for i in turns(left, self._rates)]
        counts = admit(self._left, first_slot=first_slot, rooms=self._rooms)
        taken = [left[:count] for left, count in zip(self._left, counts, strict=True)]
        self._left = [left[count:] for left, count in zip(self._left, counts, strict=True)]
        return taken
