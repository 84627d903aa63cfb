"""The load of a round, and the rounds that it is the mean of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tlora_megatron.planner.rounds.bins import part_of
from tlora_megatron.planner.rounds.spread import Part, ReplicaSpread, spread_of

_SIZES = 8
"""Number of groups into which rounds are divided by their rows."""


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
    filled: float | None = None
    """Rows of the mean micro-batch that jobs fill, where a trainer computes `rows` whatever there
    is; None = `rows` are what there is."""
    tokens: float = field(init=False, compare=False, repr=False)
    """Rows of all jobs in a round."""
    sequences: float = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", sum(self.job_tokens))
        object.__setattr__(self, "sequences", sum(self.job_sequences))

    @property
    def filled_share(self) -> float:
        """Share of the computed rows that jobs fill, padding to tiles aside."""
        return 1.0 if self.filled is None else self.filled / self.rows


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
    bins: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)
    """By round, all micro-batches as numbers (`bins.part_of`); `m * dp_size + d` is one of replica
    d."""

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
            return spread_of(self.parts(dp_size))
        same = sum(count * rows for count, rows in self.fullest) / len(self.fullest)
        return spread_of(self.parts(dp_size), is_padded=same)

    def full_spread(self, dp_size: int, rows: float) -> ReplicaSpread:
        """The spread of replicas that all compute `rows` rows a round, filled or not."""
        return replace(spread_of(self.parts(dp_size), is_padded=rows), charged=None)

    def parts(self, dp_size: int) -> Iterator[list[Part]]:
        """By round, each replica's rows and squares."""
        for bins in self.bins:
            if len(bins) == dp_size:
                yield [part_of(number) for number in bins]
            else:
                yield [part_of(sum(bins[d::dp_size])) for d in range(dp_size)]

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


class Interned:
    """Gives equal tuples one identity, by which sums over them are kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[float, ...], tuple[float, ...]] = {}

    def of(self, row: tuple[float, ...]) -> tuple[float, ...]:
        """The first tuple that was equal to this one."""
        return self._known.setdefault(row, row)


def round_up(rows: float, multiple: int) -> int:
    """Rows of a micro-batch with its padding."""
    return max(1, math.ceil(rows / multiple)) * multiple
