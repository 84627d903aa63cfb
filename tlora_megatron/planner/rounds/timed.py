"""Predicts the mean load of deep rounds, which the dispatcher shares out by predicted time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tlora_megatron.model.replicas.dispatch import admit, share_out, turns
from tlora_megatron.model.replicas.replica_rate import ReplicaRate
from tlora_megatron.planner.rounds.load import RoundLoad, round_up
from tlora_megatron.planner.rounds.spread import Part, ReplicaSpread, spread_of
from tlora_megatron.planner.workload import JobLoad

_SEQUENCES = 4096
_FEWEST_ROUNDS, _MOST_ROUNDS = 12, 64
_UNIT = 10**9
"""Whole numbers that stand for a row without attention."""


def timed_load(
    jobs: Sequence[JobLoad],
    *,
    micro_batch_tokens: int,
    dp_size: int,
    depth: int,
    curvature: float,
    row_multiple: int,
) -> RoundLoad:
    """Fills rounds of drawn lengths as a run with `round_depth` does.

    Args:
        curvature: time of a squared row of a sequence, over that of a row without attention.
    """
    square = round(curvature * _UNIT)
    rate = ReplicaRate(token_ps=_UNIT, square_ps=square, longest=micro_batch_tokens)
    packer = _TimedPacker(jobs, [rate] * dp_size, depth, row_multiple)
    while packer.wants_more:
        packer.run_round()
    return packer.result()


class _TimedPacker:
    """Fills rounds and counts what they hold."""

    def __init__(
        self, jobs: Sequence[JobLoad], rates: list[ReplicaRate], depth: int, row_multiple: int
    ) -> None:
        self._jobs, self._rates, self._row_multiple = jobs, rates, row_multiple
        self._rooms = [rate.longest for rate in rates] * depth
        self._streams = [
            job.lengths.shuffled(slot, job.batch_size) for slot, job in enumerate(jobs)
        ]
        self._left: list[list[int]] = [[] for _ in jobs]
        self._tokens, self._sequences = [0] * len(jobs), [0] * len(jobs)
        self._rows: list[int] = []
        """Padded rows of every micro-batch of all rounds."""
        self._parts: list[list[Part]] = []

    @property
    def wants_more(self) -> bool:
        """True until enough rounds have been filled."""
        done = len(self._parts)
        if done < _FEWEST_ROUNDS:
            return True
        return done < _MOST_ROUNDS and sum(self._sequences) < _SEQUENCES

    def run_round(self) -> None:
        """Fills one round."""
        for slot, job in enumerate(self._jobs):
            batch = self._left[slot] or list(itertools.islice(self._streams[slot], job.batch_size))
            self._left[slot] = [batch[i] for i in turns(batch, self._rates)]
        counts = admit(self._left, first_slot=len(self._parts), rooms=self._rooms)
        lengths = []
        for slot, count in enumerate(counts):
            taken, self._left[slot] = self._left[slot][:count], self._left[slot][count:]
            self._tokens[slot] += sum(taken)
            self._sequences[slot] += count
            lengths += taken
        self._parts.append(
            [self._part(lengths, share) for share in share_out(lengths, self._rates)]
        )

    def _part(self, lengths: Sequence[int], share: Sequence[Sequence[int]]) -> Part:
        """One replica's padded rows and squares."""
        rows = [round_up(sum(lengths[i] for i in places), self._row_multiple) for places in share]
        self._rows += rows
        return sum(rows), sum(lengths[i] ** 2 for places in share for i in places)

    def result(self) -> RoundLoad:
        """Means over the rounds so far; a micro-batch is that of the mean replica."""
        rounds, count = len(self._parts), len(self._rows)
        return RoundLoad(
            micro_batches=count / rounds / len(self._rates),
            rows=sum(self._rows) / count,
            job_tokens=tuple(n / rounds for n in self._tokens),
            job_sequences=tuple(n / rounds for n in self._sequences),
            steps=tuple(
                n / rounds / job.batch_size
                for n, job in zip(self._sequences, self._jobs, strict=True)
            ),
            spread=self._spread(),
        )

    def _spread(self) -> ReplicaSpread:
        return spread_of(self._parts, charges_mean=True)
