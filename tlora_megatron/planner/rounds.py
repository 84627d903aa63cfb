"""Predicts the mean load of a round by applying the packer's rules to expected lengths.

The rules are those of `training.packing.packing`: a job puts at most the rest of its global batch
into a round, turns go sequence by sequence, the lightest micro-batch gets the next one, and all of
a round's micro-batches have as many rows as the fullest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from tlora_megatron.planner.replica_spread import Part, ReplicaSpread, spread_of
from tlora_megatron.planner.workload import JobLoad

_MOST_SEQUENCES = 512
"""Rounds of more sequences are treated as a fluid, because single sequences no longer matter."""
LOOKED_AT = 4096
"""Approximate number of sequences to pack; rounds are repeated until it is reached. In the mixes of
`scripts/bench/planner/cases.py`, tokens and rows are then within 2 % of hundreds of real rounds,
and with a quarter of this number within 4 %."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 512
_FLUID_ROUNDS = 32
_SAMPLED_ROUNDS = 24
"""Rounds to pack where a fluid has no single replicas."""
_SIZES = 8
"""Number of groups into which rounds are divided by their rows."""
_FLUID_FILL = 0.97
"""Share of the room that full micro-batches use if sequences are small beside it."""
_DUST = 1e-6
"""Share of a sequence that is left over when a batch is done."""
_SURE = 4.0
"""Standard deviations of a round's rows for which there must be room."""


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

    @property
    def tokens(self) -> float:
        """Rows of all jobs in a round."""
        return sum(self.job_tokens)


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
    bins: tuple[tuple[Part, ...], ...] = field(default=(), compare=False, repr=False)
    """By round, rows and squares of all micro-batches; `m * dp_size + d` is one of replica d."""

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
            return spread_of(self.bins)
        parts = (
            [
                (sum(n for n, _ in own), sum(q for _, q in own))
                for own in (bins[d::dp_size] for d in range(dp_size))
            ]
            for bins in self.bins
        )
        same = sum(count * rows for count, rows in self.fullest) / len(self.fullest)
        return spread_of(parts, is_padded=same)

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


class RoundModel:
    """Predicts the rounds of a mix in the steady state; layouts share computed parts.

    Args:
        jobs: the mix.
        looked_at: approximate number of sequences to pack if batches wait for room.
    """

    def __init__(self, jobs: Sequence[JobLoad], looked_at: int = LOOKED_AT) -> None:
        self._jobs = jobs
        self._looked_at = looked_at
        self._expected: dict[tuple[int, int, int], ExpectedRounds] = {}
        self._whole: dict[int, ExpectedRounds] = {}
        """Expected rounds of whole batches with room for all, by number of bins."""
        self._loads: dict[tuple[int, int, int, int], RoundLoad] = {}
        self._own: dict[tuple[int, int, int], ReplicaSpread | None] = {}
        self._sampled: dict[tuple[int, int, int], ReplicaSpread | None] = {}

    def expected(self, *, micro_batch_tokens: int, dp_size: int, pp_size: int) -> ExpectedRounds:
        """The expected rounds for a layout and its budget."""
        key = (micro_batch_tokens, dp_size, pp_size)
        if key not in self._expected:
            self._expected[key] = self._expect(*key)
        return self._expected[key]

    def load(
        self, *, micro_batch_tokens: int, dp_size: int, pp_size: int, row_multiple: int
    ) -> RoundLoad:
        """The mean round with rows padded to a multiple."""
        key = (micro_batch_tokens, dp_size, pp_size, row_multiple)
        if key not in self._loads:
            expected = self.expected(
                micro_batch_tokens=micro_batch_tokens, dp_size=dp_size, pp_size=pp_size
            )
            spread = self._spread(expected, micro_batch_tokens, dp_size, pp_size)
            self._loads[key] = replace(expected.load(row_multiple), spread=spread)
        return self._loads[key]

    def _spread(
        self, expected: ExpectedRounds, capacity: int, dp_size: int, pp_size: int
    ) -> ReplicaSpread | None:
        """The spread of replicas' parts; of large rounds, by packing some with fewer replicas."""
        if expected.bins or dp_size == 1:
            own = (capacity, dp_size, pp_size)
            if own not in self._own:
                self._own[own] = expected.spread(dp_size)
            return self._own[own]
        batches = sum(job.batch_size for job in self._jobs)
        mean = sum(job.batch_tokens for job in self._jobs) / batches
        stages = min(pp_size, 2)  # longer pipelines have more micro-batches to even out
        room = capacity * dp_size * (4 * stages if stages > 1 else 1)
        share = min(1.0, 2 * _MOST_SEQUENCES / min(batches, room / mean))
        key = (capacity, max(2, round(dp_size * share)), stages)
        if key not in self._sampled:
            packed = _packed(_Packer(self._jobs, *key), _SAMPLED_ROUNDS)
            self._sampled[key] = packed.spread(key[1])
        found = self._sampled[key]
        if found is None:
            return None
        fullest = sum(count * rows for count, rows in expected.fullest) / len(expected.fullest)
        return replace(found, charged=found.rows * fullest * dp_size / sum(expected.job_tokens))

    def _expect(self, capacity: int, dp_size: int, pp_size: int) -> ExpectedRounds:
        jobs, bins = self._jobs, dp_size * pp_size
        sequences = sum(job.batch_size for job in jobs)
        room = capacity * dp_size * (4 * pp_size if pp_size > 1 else 1)
        packed = min(sequences, room / min(job.lengths.mean for job in jobs))
        if packed > _MOST_SEQUENCES:
            return _fluid_rounds(jobs, capacity, dp_size, pp_size)
        rounds = max(_FEWEST_ROUNDS, len(jobs))  # every job has the first turn once
        if _never_waits(jobs, capacity, bins):
            if bins not in self._whole:
                self._whole[bins] = _packed(_Packer(jobs, math.inf, bins, 1), rounds)
            whole = self._whole[bins]
            # With room for all, the capacity does not matter, nor what the bins are.
            if max(rows for _, rows in whole.fullest) <= capacity:
                return replace(whole, fullest=tuple((pp_size, rows) for _, rows in whole.fullest))
        else:
            looked_at = min(self._looked_at // int(packed + 1), _MOST_ROUNDS)
            rounds = max(rounds, looked_at, 3 * _FEWEST_ROUNDS)
        return _packed(_Packer(jobs, capacity, dp_size, pp_size), rounds)


def _packed(packer: _Packer, rounds: int) -> ExpectedRounds:
    for first_slot in range(rounds):
        packer.run_round(first_slot)
    return packer.result()


def _never_waits(jobs: Sequence[JobLoad], capacity: int, bins: int) -> bool:
    """True if all batches almost surely fit into every round, so that only lengths vary."""
    mean = sum(job.batch_tokens for job in jobs)
    spread: float = sum(job.batch_size * job.lengths.variance for job in jobs) ** 0.5
    longest = max(job.lengths.longest for job in jobs) if bins > 1 else 0
    return (mean + _SURE * spread) / bins + longest <= capacity


def num_micro_batches(tokens: float, capacity: float, dp_size: int, pp_size: int) -> int:
    """Number of micro-batches of a round on every rank, as `training.packing` chooses it."""
    if pp_size == 1:
        return 1
    return min(max(math.ceil(tokens / (capacity * dp_size)), pp_size), 4 * pp_size)


class _Packer:
    """Packs rounds of drawn lengths and counts their rows."""

    def __init__(
        self, jobs: Sequence[JobLoad], capacity: float, dp_size: int, pp_size: int
    ) -> None:
        self._jobs = jobs
        self._capacity, self._dp_size, self._pp_size = capacity, dp_size, pp_size
        self._streams: list[Iterator[int]] = [
            job.lengths.shuffled(slot, job.batch_size) for slot, job in enumerate(jobs)
        ]
        self._left: list[list[int]] = [[] for _ in jobs]
        """The rest of every job's batch, ascending: the packer takes the longest sequence first."""
        self._waited = False
        """True if a batch had to be continued in the next round."""
        self._fullest: list[tuple[int, float]] = []
        self._bins: list[tuple[Part, ...]] = []
        self._squares: list[float] = []
        """Those of the micro-batches of the round that is being filled."""
        self._tokens = [0] * len(jobs)
        self._sequences = [0] * len(jobs)

    def run_round(self, first_slot: int) -> None:
        """Fills the micro-batches of one round."""
        self._refill()
        total = sum(map(sum, self._left))
        count = num_micro_batches(total, self._capacity, self._dp_size, self._pp_size)
        bins = [(0, index) for index in range(count * self._dp_size)]
        self._squares = [0.0] * len(bins)
        slots = len(self._jobs)
        open_slots = [(first_slot + turn) % slots for turn in range(slots)]
        while open_slots:
            open_slots = [slot for slot in open_slots if self._place(slot, bins)]
        self._fullest.append((count, max(load for load, _ in bins)))
        if self._dp_size > 1:
            rows = (load for load, _ in sorted(bins, key=itemgetter(1)))
            self._bins.append(tuple(zip(rows, self._squares, strict=True)))
        self._waited = self._waited or any(self._left)

    def _refill(self) -> None:
        for slot, job in enumerate(self._jobs):
            if not self._left[slot]:
                batch = itertools.islice(self._streams[slot], job.batch_size)
                self._left[slot] = sorted(batch)

    def _place(self, slot: int, bins: list[tuple[int, int]]) -> bool:
        """Puts one sequence into the lightest bin; returns whether its job may add more."""
        left = self._left[slot]
        load, index = bins[0]
        if load + left[-1] > self._capacity:
            return False
        length = left.pop()
        heapq.heapreplace(bins, (load + length, index))
        self._squares[index] += length * length
        self._tokens[slot] += length
        self._sequences[slot] += 1
        return bool(left)

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


def _fluid_rounds(
    jobs: Sequence[JobLoad], capacity: int, dp_size: int, pp_size: int
) -> ExpectedRounds:
    """Estimates large rounds: each job gets equally many sequences, or the rest of its batch."""
    means = [job.lengths.mean for job in jobs]
    left = [0.0] * len(jobs)
    total = [0.0] * len(jobs)
    fullest = []
    for _ in range(_FLUID_ROUNDS):
        left = [n if n > _DUST else job.batch_size for n, job in zip(left, jobs, strict=True)]
        wanted = _dot(left, means)
        count = num_micro_batches(wanted, capacity, dp_size, pp_size)
        bins = count * dp_size
        share = _fair_share(left, means, min(wanted, _FLUID_FILL * capacity * bins))
        taken = [min(n, share) for n in left]
        tokens = _dot(taken, means)
        beyond = tokens / sum(taken) / 2 if bins > 1 else 0.0
        fullest.append((count, min(float(capacity), tokens / bins + beyond)))
        left = [n - t for n, t in zip(left, taken, strict=True)]
        total = [n + t for n, t in zip(total, taken, strict=True)]
    sequences = [n / _FLUID_ROUNDS for n in total]
    return ExpectedRounds(
        fullest=tuple(fullest),
        job_tokens=tuple(n * mean for n, mean in zip(sequences, means, strict=True)),
        job_sequences=tuple(sequences),
        steps=tuple(n / job.batch_size for n, job in zip(sequences, jobs, strict=True)),
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


def round_up(rows: float, multiple: int) -> int:
    """Rows of a micro-batch with its padding."""
    return max(1, math.ceil(rows / multiple)) * multiple
