"""Predicts the mean load of a round by applying the packer's rules to expected lengths.

The rules are those of `training.packing.packing`: a job puts at most the rest of its global batch
into a round, turns go sequence by sequence, the lightest micro-batch gets the next one, and all of
a round's micro-batches have as many rows as the fullest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.rounds.load import (
    DrawnBatches,
    ExpectedRounds,
    ReplicaSpread,
    RoundLoad,
)
from tlora_megatron.planner.rounds.packer import Packer, RoundShape, packed_rounds
from tlora_megatron.planner.workload import JobLoad

_FLUID_ROUNDS = 32
FILL = 0.97
"""Share of the room that full micro-batches use if sequences are small beside it."""
_DUST = 1e-6
"""Share of a sequence that is left over when a batch is done."""


class Flow(NamedTuple):
    """Large rounds, however many replicas share the rows of a micro-batch's turn."""

    rounds: tuple[tuple[int, float, float], ...]
    """By round, micro-batches of a replica, rows and sequences."""
    sequences: tuple[float, ...]
    """Sequences of each job in the mean round."""


def fluid_flow(jobs: Sequence[JobLoad], shape: RoundShape) -> Flow:
    """Fills large rounds: each job gets equally many sequences, or the rest of its batch."""
    means = [job.lengths.mean for job in jobs]
    left = [0.0] * len(jobs)
    total = [0.0] * len(jobs)
    rounds = []
    for _ in range(_FLUID_ROUNDS):
        left = [n if n > _DUST else job.batch_size for n, job in zip(left, jobs, strict=True)]
        wanted = _dot(left, means)
        count = shape.micro_batches(wanted)
        room = FILL * shape.capacity * count * shape.dp_size
        share = _fair_share(left, means, min(wanted, room))
        taken = [n if n < share else share for n in left]
        rounds.append((count, _dot(taken, means), sum(taken)))
        left = [n - t for n, t in zip(left, taken, strict=True)]
        total = [n + t for n, t in zip(total, taken, strict=True)]
        if not any(left):
            break  # the next rounds are the same again
    return Flow(tuple(rounds), tuple(n / len(rounds) for n in total))


def fluid_rounds(jobs: Sequence[JobLoad], shape: RoundShape, flow: Flow) -> ExpectedRounds:
    fullest = []
    for count, tokens, sequences in flow.rounds:
        bins = count * shape.dp_size
        beyond = tokens / sequences / 2 if bins > 1 else 0.0
        fullest.append((count, min(float(shape.capacity), tokens / bins + beyond)))
    filled = list(zip(flow.sequences, jobs, strict=True))
    return ExpectedRounds(
        fullest=tuple(fullest),
        job_tokens=tuple(n * job.lengths.mean for n, job in filled),
        job_sequences=flow.sequences,
        steps=tuple(n / job.batch_size for n, job in filled),
    )


def _fair_share(left: Sequence[float], means: Sequence[float], tokens: float) -> float:
    """The number of sequences that each job may add so that all together have `tokens` rows."""
    rate = sum(means)
    share = 0.0
    for most, mean in sorted(zip(left, means, strict=True)):
        step = min(most - share, tokens / rate)
        share += step
        tokens -= step * rate
        rate -= mean
        if tokens <= 0 or rate <= 0:
            break
    return share


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


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
    """Predicts the rounds of a mix in the steady state; layouts share computed parts."""

    def __init__(self, jobs: Sequence[JobLoad], looked_at: int = LOOKED_AT) -> None:
        self._jobs = jobs
        self._looked_at = looked_at
        self._batches = DrawnBatches(jobs)
        self._sequences = sum(job.batch_size for job in jobs)
        self._tokens = sum(job.batch_tokens for job in jobs)
        self._deviation: float = sum(j.batch_size * j.lengths.variance for j in jobs) ** 0.5
        """Standard deviation of the rows of all batches."""
        self._rows: dict[tuple[float, ...], tuple[float, ...]] = {}
        """The first of equal tuples: sums over them are kept by their identity."""
        self._flows: dict[tuple[float, int, int | None], Flow] = {}
        self._expected: dict[RoundShape, ExpectedRounds] = {}
        self._whole: dict[tuple[int, int], ExpectedRounds] = {}
        """Expected rounds of whole batches with room for all, by number of bins and of rounds."""
        self._loads: dict[tuple[int, int, int, int, bool], RoundLoad] = {}
        self._own: dict[RoundShape, ReplicaSpread | None] = {}
        self._sampled: dict[RoundShape, ReplicaSpread | None] = {}
        self._full: dict[tuple[int, int, int, int, bool], RoundLoad] = {}

    def expected(self, shape: RoundShape) -> ExpectedRounds:
        """The expected rounds of a layout with its budget."""
        if shape not in self._expected:
            found, first_of = self._expect(shape), self._rows.setdefault
            self._expected[shape] = replace(
                found,
                job_tokens=first_of(found.job_tokens, found.job_tokens),
                job_sequences=first_of(found.job_sequences, found.job_sequences),
                steps=first_of(found.steps, found.steps),
            )
        return self._expected[shape]

    def load(self, plan: Plan, row_multiple: int, *, spreads: bool = True) -> RoundLoad:
        """The mean round with rows padded to a multiple; `spreads` also finds replicas' parts."""
        key = (plan.micro_batch_tokens, plan.dp_size, plan.pp_size, row_multiple, spreads)
        if key not in self._loads:
            shape = RoundShape(*key[:3])
            expected = self.expected(shape)
            spread = self._spread(expected, shape) if spreads else None
            self._loads[key] = replace(expected.load(row_multiple), spread=spread)
        return self._loads[key]

    def full_load(self, plan: Plan, capacity: int, *, spreads: bool = True) -> RoundLoad:
        """The mean round of a trainer that runs a fixed number of micro-batches, all rows of each.

        `capacity` are the rows of one that jobs may fill. To find replicas' parts takes longest.
        """
        rows, count = plan.micro_batch_tokens, plan.num_micro_batches
        assert count is not None, "their number is fixed"
        key = (capacity, rows, plan.dp_size, count, spreads)
        if key not in self._full:
            shape = RoundShape(capacity, plan.dp_size, 1, count)
            expected = self.expected(shape)
            self._full[key] = RoundLoad(
                micro_batches=count,
                rows=rows,
                job_tokens=expected.job_tokens,
                job_sequences=expected.job_sequences,
                steps=expected.steps,
                spread=self._full_spread(expected, shape, count, rows) if spreads else None,
                filled=sum(expected.job_tokens) / (count * plan.dp_size),
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
        self, expected: ExpectedRounds, shape: RoundShape, count: int, rows: int
    ) -> ReplicaSpread | None:
        """The spread of replicas that compute equally many rows; they differ in attention."""
        if shape.dp_size == 1:
            return None
        if expected.bins:
            return expected.full_spread(shape.dp_size, count * rows)
        count = min(count, _SAMPLED_DEPTH)  # more even out
        fewer = shape._replace(dp_size=self._few_replicas(shape), fixed=count)
        packed = packed_rounds(Packer(self._batches, fewer), _SAMPLED_ROUNDS)
        return packed.full_spread(fewer.dp_size, count * rows)

    def _spread(self, expected: ExpectedRounds, shape: RoundShape) -> ReplicaSpread | None:
        """The spread of replicas' parts; of large rounds, by packing some with fewer replicas."""
        if expected.bins or shape.dp_size == 1:
            if shape not in self._own:
                self._own[shape] = expected.spread(shape.dp_size)
            return self._own[shape]
        # Longer pipelines have more micro-batches to even out.
        fewer = shape._replace(pp_size=min(shape.pp_size, 2))
        fewer = fewer._replace(dp_size=self._few_replicas(fewer))
        if fewer not in self._sampled:
            packed = packed_rounds(Packer(self._batches, fewer), _SAMPLED_ROUNDS)
            self._sampled[fewer] = packed.spread(fewer.dp_size)
        found = self._sampled[fewer]
        if found is None:
            return None
        fullest = sum(count * rows for count, rows in expected.fullest) / len(expected.fullest)
        tokens = sum(expected.job_tokens)
        return replace(found, charged=found.rows * fullest * shape.dp_size / tokens)

    def _few_replicas(self, shape: RoundShape) -> int:
        """Replicas of which a round has so few sequences that single ones matter."""
        mean = self._tokens / self._sequences
        share = 2 * _MOST_SEQUENCES / min(self._sequences, shape.room / mean)
        return max(2, round(shape.dp_size * min(1.0, share)))

    def _expect(self, shape: RoundShape) -> ExpectedRounds:
        jobs, fewest, sequences = self._jobs, shape.fixed or shape.pp_size, self._sequences
        packed = min(sequences, shape.room / min(job.lengths.mean for job in jobs))
        if packed > _MOST_SEQUENCES:
            key = shape.capacity * shape.dp_size, shape.pp_size, shape.fixed
            if key not in self._flows:
                self._flows[key] = fluid_flow(jobs, shape)
            return fluid_rounds(jobs, shape, self._flows[key])
        rounds = max(_FEWEST_ROUNDS, len(jobs))  # every job has the first turn once
        bins = shape.dp_size * fewest
        longest = max(job.lengths.longest for job in jobs) if bins > 1 else 0
        if (self._tokens + _SURE * self._deviation) / bins + longest <= shape.capacity:
            # All batches almost surely fit into every round, so that only lengths vary.
            least = _SEQUENCES_OF_FULL // sequences if shape.fixed and shape.dp_size > 1 else 0
            whole = self._whole_of(bins, least)
            # With room for all, the capacity does not matter, nor what the bins are.
            if max(rows for _, rows in whole.fullest) <= shape.capacity:
                return replace(whole, fullest=tuple((fewest, rows) for _, rows in whole.fullest))
        else:
            looked_at = min(self._looked_at // int(packed + 1), _MOST_ROUNDS)
            rounds = max(rounds, looked_at, 3 * _FEWEST_ROUNDS)
        return packed_rounds(Packer(self._batches, shape), rounds)

    def _whole_of(self, bins: int, least: int = 0) -> ExpectedRounds:
        """Rounds of so many micro-batches with room for all batches; `least` of them or more."""
        rounds = max(_FEWEST_ROUNDS, len(self._jobs), least)
        if (bins, rounds) not in self._whole:
            packer = Packer(self._batches, RoundShape(math.inf, bins, 1))
            self._whole[bins, rounds] = packed_rounds(packer, rounds)
        return self._whole[bins, rounds]


_STAGE_DEPTH = 4
"""Most micro-batches for each stage, as `tlora train` has them: a job steps once a round at most,
so long rounds keep jobs with small batches waiting for the others."""
_MOST_EMPTY = 1.5
"""Room of a round, over all batches together, beyond which a smaller size is surely better."""
_TILE = 128


def full_sizes(
    rounds: RoundModel, jobs: Sequence[JobLoad], layout: Plan, budgets: Sequence[int]
) -> list[tuple[int, int]]:
    """Ascending budgets with the numbers of micro-batches that they fill best, each pair once.

    All micro-batches are computed whole. Budgets that just hold all batches come in addition:
    padding is computed like anything else.
    """
    tokens = sum(job.batch_tokens for job in jobs)
    seen: set[tuple[int, int]] = set()
    for number, budget in enumerate(budgets):
        wanted = tokens / (budget * layout.dp_size)
        for count in _counts(layout, wanted):
            if number and count > _MOST_EMPTY * wanted:
                continue
            seen.add((budget, count))
    if len(budgets) > 1:
        seen.update(_just_enough(rounds, layout, budgets[0]))
    return sorted(seen)


def _counts(layout: Plan, wanted: float) -> set[int]:
    """Numbers of micro-batches next to the one that would hold all batches."""
    # An interleaved schedule runs whole groups.
    unit, most = layout.pp_size if layout.vpp_size > 1 else 1, _most(layout)
    below, above = (max(1, part(wanted / unit)) * unit for part in (math.floor, math.ceil))
    counts = {min(below, most), min(above, most)}
    return counts if layout.pp_size > 1 else counts | {1}


def _just_enough(rounds: RoundModel, layout: Plan, least: int) -> Iterator[tuple[int, int]]:
    """Budgets that hold all batches in the mean round, and in every round that was looked at."""
    step = _TILE * layout.tp_size * layout.cp_size
    unit = layout.pp_size
    for count in range(unit, _most(layout) + 1, unit):
        for rows in rounds.rows_for_all(count * layout.dp_size):
            budget = math.ceil(rows / step) * step
            if budget >= least:
                yield budget, count


def _most(layout: Plan) -> int:
    """Most micro-batches; several without a pipeline only even out the replicas' attention."""
    return _STAGE_DEPTH * layout.pp_size if max(layout.pp_size, layout.dp_size) > 1 else 1
