"""Predicts the mean load of a round by applying the packer's rules to expected lengths.

The rules are those of `training.packing.packing`: a job puts at most the rest of its global batch
into a round, turns go sequence by sequence, the lightest micro-batch gets the next one, and all of
a round's micro-batches have as many rows as the fullest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tlora_megatron.planner.rounds.bins import DrawnBatches
from tlora_megatron.planner.rounds.fluid import FILL, Flow, fluid_flow, fluid_rounds
from tlora_megatron.planner.rounds.load import ExpectedRounds, Interned, RoundLoad
from tlora_megatron.planner.rounds.packer import Packer, RoundShape, packed_rounds
from tlora_megatron.planner.rounds.spread import ReplicaSpread
from tlora_megatron.planner.workload import JobLoad

_MOST_SEQUENCES = 512
"""Rounds of more sequences are treated as a fluid, because single sequences no longer matter."""
LOOKED_AT = 4096
"""Approximate number of sequences to pack; rounds are repeated until it is reached. In the mixes of
`scripts/bench/planner/cases.py`, tokens and rows are then within 2 % of hundreds of real rounds,
and with a quarter of this number within 4 %."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 512
_SEQUENCES_OF_FULL = 512
"""Sequences to pack where all replicas compute equally many rows, so that only the sequences'
lengths tell which of them is waited for: a few small rounds would not show it."""
_SAMPLED_ROUNDS = 24
"""Rounds to pack where a fluid has no single replicas."""
_SAMPLED_DEPTH = 8
"""Most micro-batches of a replica in such a round, where their number is fixed."""
_SURE = 4.0
"""Standard deviations of a round's rows for which there must be room."""


class RoundModel:
    """Predicts the rounds of a mix in the steady state; layouts share computed parts.

    Args:
        jobs: the mix.
        looked_at: approximate number of sequences to pack if batches wait for room.
    """

    def __init__(self, jobs: Sequence[JobLoad], looked_at: int = LOOKED_AT) -> None:
        self._jobs = jobs
        self._looked_at = looked_at
        self._batches = DrawnBatches(jobs)
        self._sequences = sum(job.batch_size for job in jobs)
        self._tokens = sum(job.batch_tokens for job in jobs)
        self._deviation: float = sum(j.batch_size * j.lengths.variance for j in jobs) ** 0.5
        """Standard deviation of the rows of all batches."""
        self._rows = Interned()
        self._flows: dict[tuple[float, int, int | None], Flow] = {}
        self._expected: dict[RoundShape, ExpectedRounds] = {}
        self._whole: dict[tuple[int, int], ExpectedRounds] = {}
        """Expected rounds of whole batches with room for all, by number of bins and of rounds."""
        self._loads: dict[tuple[int, int, int, int, bool], RoundLoad] = {}
        self._own: dict[tuple[int, int, int], ReplicaSpread | None] = {}
        self._sampled: dict[tuple[int, int, int], ReplicaSpread | None] = {}
        self._full: dict[tuple[int, int, int, int, bool], RoundLoad] = {}

    def expected(self, *, micro_batch_tokens: int, dp_size: int, pp_size: int) -> ExpectedRounds:
        """The expected rounds for a layout and its budget."""
        return self._expected_of(RoundShape(micro_batch_tokens, dp_size, pp_size))

    def _expected_of(self, shape: RoundShape) -> ExpectedRounds:
        if shape not in self._expected:
            self._expected[shape] = self._interned(self._expect(shape))
        return self._expected[shape]

    def _interned(self, expected: ExpectedRounds) -> ExpectedRounds:
        """The rounds with tuples that are the same objects where they are equal."""
        return replace(
            expected,
            job_tokens=self._rows.of(expected.job_tokens),
            job_sequences=self._rows.of(expected.job_sequences),
            steps=self._rows.of(expected.steps),
        )

    def load(
        self,
        *,
        micro_batch_tokens: int,
        dp_size: int,
        pp_size: int,
        row_multiple: int,
        spreads: bool = True,
    ) -> RoundLoad:
        """The mean round with rows padded to a multiple.

        Args:
            spreads: also find the spread of replicas' parts, which takes longest.
        """
        key = (micro_batch_tokens, dp_size, pp_size, row_multiple, spreads)
        if key not in self._loads:
            expected = self.expected(
                micro_batch_tokens=micro_batch_tokens, dp_size=dp_size, pp_size=pp_size
            )
            spread = None
            if spreads:
                spread = self._spread(expected, micro_batch_tokens, dp_size, pp_size)
            self._loads[key] = replace(expected.load(row_multiple), spread=spread)
        return self._loads[key]

    def full_load(
        self,
        *,
        capacity: int,
        rows: int,
        dp_size: int,
        num_micro_batches: int,
        spreads: bool = True,
    ) -> RoundLoad:
        """The mean round of a trainer that runs so many micro-batches of `rows` rows each.

        Args:
            capacity: rows of a micro-batch that jobs may fill.
            spreads: also find the spread of replicas' parts, which takes longest.
        """
        key = (capacity, rows, dp_size, num_micro_batches, spreads)
        if key not in self._full:
            expected = self._expected_of(RoundShape(capacity, dp_size, 1, num_micro_batches))
            self._full[key] = RoundLoad(
                micro_batches=num_micro_batches,
                rows=rows,
                job_tokens=expected.job_tokens,
                job_sequences=expected.job_sequences,
                steps=expected.steps,
                spread=self._full_spread(expected, *key[:4]) if spreads else None,
                filled=sum(expected.job_tokens) / (num_micro_batches * dp_size),
            )
        return self._full[key]

    def rows_for_all(self, bins: int) -> tuple[float, float]:
        """Rows of the fullest of `bins` micro-batches that hold all batches: mean and most."""
        if self._sequences > _MOST_SEQUENCES:
            mean, deviation = self._tokens, self._deviation
            return mean / bins / FILL, (mean + deviation) / bins / FILL
        fullest = [rows for _, rows in self._whole_of(bins).fullest]
        return sum(fullest) / len(fullest), max(fullest)

    def _full_spread(
        self, expected: ExpectedRounds, capacity: int, rows: int, dp_size: int, count: int
    ) -> ReplicaSpread | None:
        """The spread of replicas that compute equally many rows; they differ in attention."""
        if dp_size == 1:
            return None
        if expected.bins:
            return expected.full_spread(dp_size, count * rows)
        batches, mean = self._sequences, self._tokens / self._sequences
        share = min(1.0, 2 * _MOST_SEQUENCES / min(batches, capacity * dp_size * count / mean))
        count = min(count, _SAMPLED_DEPTH)  # more even out
        shape = RoundShape(capacity, max(2, round(dp_size * share)), 1, count)
        packed = packed_rounds(Packer(self._batches, shape), _SAMPLED_ROUNDS)
        return packed.full_spread(shape.dp_size, count * rows)

    def _spread(
        self, expected: ExpectedRounds, capacity: int, dp_size: int, pp_size: int
    ) -> ReplicaSpread | None:
        """The spread of replicas' parts; of large rounds, by packing some with fewer replicas."""
        if expected.bins or dp_size == 1:
            own = (capacity, dp_size, pp_size)
            if own not in self._own:
                self._own[own] = expected.spread(dp_size)
            return self._own[own]
        batches, mean = self._sequences, self._tokens / self._sequences
        stages = min(pp_size, 2)  # longer pipelines have more micro-batches to even out
        room = capacity * dp_size * (4 * stages if stages > 1 else 1)
        share = min(1.0, 2 * _MOST_SEQUENCES / min(batches, room / mean))
        key = (capacity, max(2, round(dp_size * share)), stages)
        if key not in self._sampled:
            packed = packed_rounds(Packer(self._batches, RoundShape(*key)), _SAMPLED_ROUNDS)
            self._sampled[key] = packed.spread(key[1])
        found = self._sampled[key]
        if found is None:
            return None
        fullest = sum(count * rows for count, rows in expected.fullest) / len(expected.fullest)
        return replace(found, charged=found.rows * fullest * dp_size / sum(expected.job_tokens))

    def _expect(self, shape: RoundShape) -> ExpectedRounds:
        jobs, fewest = self._jobs, shape.fixed or shape.pp_size
        sequences = sum(job.batch_size for job in jobs)
        packed = min(sequences, shape.room / min(job.lengths.mean for job in jobs))
        if packed > _MOST_SEQUENCES:
            return fluid_rounds(jobs, shape, self._flow_of(shape))
        rounds = max(_FEWEST_ROUNDS, len(jobs))  # every job has the first turn once
        if _never_waits(jobs, shape.capacity, shape.dp_size * fewest):
            least = _SEQUENCES_OF_FULL // sequences if shape.fixed and shape.dp_size > 1 else 0
            whole = self._whole_of(shape.dp_size * fewest, least)
            # With room for all, the capacity does not matter, nor what the bins are.
            if max(rows for _, rows in whole.fullest) <= shape.capacity:
                return replace(whole, fullest=tuple((fewest, rows) for _, rows in whole.fullest))
        else:
            looked_at = min(self._looked_at // int(packed + 1), _MOST_ROUNDS)
            rounds = max(rounds, looked_at, 3 * _FEWEST_ROUNDS)
        return packed_rounds(Packer(self._batches, shape), rounds)

    def _flow_of(self, shape: RoundShape) -> Flow:
        key = shape.capacity * shape.dp_size, shape.pp_size, shape.fixed
        if key not in self._flows:
            self._flows[key] = fluid_flow(self._jobs, shape)
        return self._flows[key]

    def _whole_of(self, bins: int, least: int = 0) -> ExpectedRounds:
        """Rounds of so many micro-batches with room for all batches; `least` of them or more."""
        rounds = max(_FEWEST_ROUNDS, len(self._jobs), least)
        if (bins, rounds) not in self._whole:
            packer = Packer(self._batches, RoundShape(math.inf, bins, 1))
            self._whole[bins, rounds] = packed_rounds(packer, rounds)
        return self._whole[bins, rounds]


def _never_waits(jobs: Sequence[JobLoad], capacity: float, bins: int) -> bool:
    """True if all batches almost surely fit into every round, so that only lengths vary."""
    mean = sum(job.batch_tokens for job in jobs)
    spread: float = sum(job.batch_size * job.lengths.variance for job in jobs) ** 0.5
    longest = max(job.lengths.longest for job in jobs) if bins > 1 else 0
    return (mean + _SURE * spread) / bins + longest <= capacity
