"""A job as the planner sees it: adapter, batch and sequence lengths, without its data."""

from __future__ import annotations

import functools
import itertools
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from tlora_megatron.config.job import (
    EXPERT_TARGETS,
    FUSED_EXPERT_TARGETS,
    HF_TARGETS,
    MEGATRON_TARGETS,
    SHARED_EXPERT_TARGETS,
    JobSpec,
)
from tlora_megatron.config.reader import show

_SUM_TOLERANCE = 1e-6
_MOST_BINS = 64
_SPREAD = 1024
"""Number of lengths in a job's stream before it repeats; a power of two."""
_SMALLEST_BLOCK = 64


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """The distribution of a job's sequence lengths, without their last tokens."""

    pairs: tuple[tuple[int, float], ...]
    """Pairs of length and share of sequences; lengths ascend, shares add up to 1."""
    mean: float = field(init=False, compare=False, repr=False)
    """Mean length."""
    squares: float = field(init=False, compare=False, repr=False)
    """Mean squared length."""

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ValueError("lengths must hold at least one length, got none")
        previous = 0
        for length, share in self.pairs:
            if length <= previous:
                raise ValueError(f"lengths must be positive and ascend, got {length}")
            if not 0 < share <= 1 + _SUM_TOLERANCE:
                raise ValueError(f"shares of lengths must be in (0, 1], got {share}")
            previous = length
        total = sum(share for _, share in self.pairs)
        if abs(total - 1) > _SUM_TOLERANCE:
            raise ValueError(f"shares of lengths must add up to 1, got {total}")
        object.__setattr__(self, "mean", sum(length * share for length, share in self.pairs))
        object.__setattr__(self, "squares", sum(length**2 * share for length, share in self.pairs))

    @classmethod
    def single(cls, length: int) -> LengthHistogram:
        """The histogram of sequences that all have one length."""
        return cls(((length, 1.0),))

    @classmethod
    def from_counts(cls, counts: Iterable[tuple[int, float]]) -> LengthHistogram:
        """Makes a histogram from lengths and how often each occurs, all positive, in any order."""
        merged: Counter[int] = Counter()
        for length, count in counts:
            if not 0 < count < math.inf:
                raise ValueError(f"counts of lengths must be positive, got {show(count)}")
            merged[length] += count  # type: ignore[assignment]
        total = sum(merged.values())
        return cls(tuple((length, count / total) for length, count in sorted(merged.items())))

    @classmethod
    def from_lengths(cls, lengths: Iterable[int], most_bins: int = _MOST_BINS) -> LengthHistogram:
        """Makes a histogram from the lengths of all sequences.

        Its bins hold about equally many tokens, so that a long tail keeps its lengths, and
        attention its sum of squares. A bin's length is its mean, rounded up; the longest sequence
        has one of its own.
        """
        ordered = sorted(lengths)
        if not ordered:
            raise ValueError("lengths must hold at least one length, got none")
        if ordered[0] < 1:
            raise ValueError(f"lengths must be positive and ascend, got {ordered[0]}")
        if len(set(ordered)) <= most_bins:
            return cls.from_counts((length, count) for length, count in Counter(ordered).items())
        *rest, longest = ordered
        bins = _bins_of_tokens(rest, most_bins - 1)
        groups = [[n for _, n in own] for _, own in itertools.groupby(bins, itemgetter(0))]
        return cls.from_counts((-(-sum(g) // len(g)), len(g)) for g in [*groups, [longest]])

    @property
    def variance(self) -> float:
        return self.squares - self.mean**2

    @property
    def longest(self) -> int:
        return self.pairs[-1][0]

    def clipped(self, longest: int) -> LengthHistogram:
        """The histogram with lengths over `longest` cut to it."""
        return self.from_counts((min(length, longest), share) for length, share in self.pairs)

    def split(self, longest: int) -> LengthHistogram:
        """The histogram with lengths over `longest` in parts of it, and of what is left."""
        parts = (
            (length, share * number)
            for whole, share in self.pairs
            for length, number in ((longest, whole // longest), (whole % longest, 1))
        )
        return self.from_counts((length, count) for length, count in parts if length and count)

    def spread(self) -> Iterator[int]:
        """Endless lengths in van der Corput's order; any run has the right shares."""
        return itertools.cycle(_spread_lengths(self.pairs))

    def shuffled(self, seed: int, batch_size: int) -> Iterator[int]:
        """The same lengths in a random order, so that the sums of batches differ as in real data.

        In the order of `spread` they would hardly differ, and too many batches would fit. The
        shares are right again in every 32 batches.
        """
        if len(self.pairs) == 1:
            return itertools.repeat(self.longest)
        block = max(_SMALLEST_BLOCK, 2 ** math.ceil(math.log2(32 * batch_size)))
        return itertools.cycle(_shuffled_lengths(self.pairs, seed, min(block, _SPREAD)))


def guessed_lengths(longest: int) -> LengthHistogram:
    """Lengths of a job of which only the longest is known: one in ten has it, the rest a fourth."""
    short = max(1, longest // 4)
    return LengthHistogram.from_counts([(short, 9.0), (longest, 1.0)])


def _bins_of_tokens(
    ordered: Sequence[int], most_bins: int
) -> Iterator[tuple[tuple[int, int], int]]:
    """Pairs of a bin and a length; a fourth of the bins divides the longest."""
    octaves = most_bins // 4
    bins, total, longest = most_bins - octaves, sum(ordered), ordered[-1]
    before = itertools.accumulate(ordered[:-1], initial=0)
    for length, tokens in zip(ordered, before, strict=True):
        octave = min((longest // length).bit_length() - 1, octaves)
        yield (tokens * bins // total, -octave), length


@functools.lru_cache(maxsize=4096)
def _shuffled_lengths(
    pairs: tuple[tuple[int, float], ...], seed: int, block: int
) -> tuple[int, ...]:
    lengths = _spread_lengths(pairs)
    return tuple(lengths[place] for place in _permutation(seed, block))


@functools.lru_cache(maxsize=1024)
def _permutation(seed: int, block: int) -> tuple[int, ...]:
    """Positions of a stream, shuffled within each block of a power of two."""
    draw = random.Random(seed)
    blocks = (range(begin, begin + block) for begin in range(0, _SPREAD, block))
    return tuple(place for own in blocks for place in draw.sample(own, block))


@functools.lru_cache(maxsize=1024)
def _spread_lengths(pairs: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    """Quantiles of a histogram at 1/2, 1/4, 3/4, 1/8, 5/8, ...: the middles of `_SPREAD` parts."""
    ends = itertools.accumulate(share for _, share in pairs)
    counts = [0, *(bisect_left(_MIDDLES, end) for end in ends)]
    counts[-1] = _SPREAD
    ascending: list[int] = []
    for (length, _), (begin, end) in zip(pairs, itertools.pairwise(counts), strict=True):
        ascending += [length] * (end - begin)
    return tuple(ascending[place] for place in _MIRRORED)


_MIDDLES = [(part + 0.5) / _SPREAD for part in range(_SPREAD)]
_MIRRORED = [
    int(f"{index:0{_SPREAD.bit_length() - 1}b}"[::-1], 2) for index in (*range(1, _SPREAD), 0)
]
"""The order of van der Corput: the binary digits of 1, 2, 3, ... in reverse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLoad:
    name: str
    rank: int
    targets: tuple[str, ...] = HF_TARGETS
    batch_size: int
    """Sequences per optimizer step, over all data-parallel ranks."""
    lengths: LengthHistogram
    dropout: float = 0.0
    target_share: float = 1.0
    """Share of rows with a target; only these reach the output layer."""
    longest_eval: int = 0
    """Rows of the longest evaluation sequence, which a micro-batch must hold too."""
    num_blocks: int = 1
    """Diagonal blocks of a block-diagonal adapter; 1: a standard adapter."""
    expert_rank: int | None = None
    """Rank of the adapter on routed experts; None: `rank`."""
    shares_outer: bool = False
    """All routed experts of a layer share the adapter's factors on their hidden side."""
    is_open: bool = False
    """A client drives it: batch and lengths are a guess that memory must hold, and nobody knows how
    often there is one."""

    def __post_init__(self) -> None:
        of_experts = EXPERT_TARGETS + FUSED_EXPERT_TARGETS + SHARED_EXPERT_TARGETS
        known = HF_TARGETS + MEGATRON_TARGETS + of_experts
        blocks = max(1, self.num_blocks)
        rules = (
            ("num_blocks", "be at least 1", self.num_blocks, self.num_blocks >= 1),
            ("rank", "be at least 1", self.rank, self.rank >= 1),
            ("batch_size", "be at least 1", self.batch_size, self.batch_size >= 1),
            ("dropout", "be in [0, 1)", self.dropout, 0 <= self.dropout < 1),
            ("target_share", "be in (0, 1]", self.target_share, 0 < self.target_share <= 1),
            (
                "rank",
                "be a multiple of num_blocks",
                self.rank,
                self.rank % blocks == 0,
            ),
            ("targets", "name at least one linear", self.targets, bool(self.targets)),
            ("targets", f"be among {', '.join(known)}", self.targets, {*self.targets} <= {*known}),
        )
        for name, obligation, value, holds in rules:
            if not holds:
                raise ValueError(f"{name} of job {self.name!r} must {obligation}, got {value}")

    @classmethod
    def from_spec(
        cls,
        job: JobSpec,
        lengths: LengthHistogram,
        target_share: float = 1.0,
        longest_eval: int = 0,
    ) -> JobLoad:
        """The load of a configured job with these sequence lengths."""
        return cls(
            name=job.name,
            rank=job.lora.rank,
            targets=job.lora.target_modules,
            batch_size=job.batch_size,
            lengths=lengths,
            dropout=job.lora.dropout,
            target_share=target_share,
            longest_eval=longest_eval,
            num_blocks=job.lora.num_blocks,
            expert_rank=job.lora.expert_rank,
            shares_outer=job.lora.shares_outer,
            is_open=job.driven,
        )

    def local_rank(self, tp_size: int) -> int:
        """The same as `LoraSpec.local_rank`."""
        return self.rank if self.num_blocks == 1 else self.rank // tp_size

    @property
    def batch_tokens(self) -> float:
        """Mean number of rows of an optimizer step."""
        return self.batch_size * self.lengths.mean


def longest_of(jobs: Iterable[JobLoad]) -> int:
    """Rows of the longest sequence that a micro-batch must hold, for training or evaluation."""
    return max(max(job.lengths.longest, job.longest_eval) for job in jobs)


def check_jobs(jobs: Iterable[JobLoad]) -> None:
    """Refuses an empty mix and repeated names; raises `ValueError` naming the job."""
    names = Counter(job.name for job in jobs)
    if not names:
        raise ValueError("jobs must hold at least one job, got none")
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"jobs must have unique names, got {name!r} {count} times")
