"""Coarse loads: similar jobs become one kind, so that a scheduler's questions repeat.

Every uploaded file has lengths of its own. Asked as they are, each pair of files would be a new
question to the planner, at milliseconds each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tlora_megatron.planner.cost.expert_adapters import adapts_experts
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

_RANK_STEP = 16
"""Kernels round ranks up to multiples of it."""
_NUM_QUANTILES = 8
_LENGTHS_PER_OCTAVE = 4
_BATCHES_PER_OCTAVE = 2
_ANY_DROPOUT = 0.1
"""Every dropout rate costs the same."""
_SHARE_STEPS = 8
_ROUNDING = 1e-9


def coarse_load(load: JobLoad) -> JobLoad:
    """The load as a scheduler asks about it; at least as large as the job in what memory holds.

    The rank is rounded up to 16s (a block-diagonal one as it is, that on routed experts to a power
    of 2: there kernels pad nothing, and memory is large), the batch to a power of sqrt 2, lengths
    to 8 quantiles on a grid of 4 an octave, the share of targets up to eighths.
    """
    rank = load.rank
    if load.num_blocks == 1:
        rank = -(-rank // _RANK_STEP) * _RANK_STEP
    return replace(
        load,
        name="job",
        rank=rank,
        expert_rank=_on_experts(load),
        batch_size=_on_grid(load.batch_size, _BATCHES_PER_OCTAVE),
        lengths=coarse_lengths(load.lengths),
        dropout=_ANY_DROPOUT if load.dropout else 0.0,
        target_share=math.ceil(load.target_share * _SHARE_STEPS) / _SHARE_STEPS,
        longest_eval=_length(load.longest_eval, up=True) if load.longest_eval else 0,
    )


def _on_experts(load: JobLoad) -> int | None:
    if not adapts_experts(load):
        return None
    return 1 << ((load.expert_rank or load.rank) - 1).bit_length()


def coarse_lengths(lengths: LengthHistogram) -> LengthHistogram:
    """Eight equally likely lengths on a geometric grid; the longest is never rounded down."""
    ends = list(accumulate(share for _, share in lengths.pairs))
    means = [_mean_between(lengths, ends, i) for i in range(_NUM_QUANTILES)]
    rounded = [_length(mean, up=False) for mean in means]
    rounded[-1] = _length(lengths.longest, up=True)
    return LengthHistogram.from_counts((length, 1.0) for length in rounded)


def _mean_between(lengths: LengthHistogram, ends: Sequence[float], quantile: int) -> float:
    """Mean length of one of `_NUM_QUANTILES` equal parts of the sequences."""
    begin, end = quantile / _NUM_QUANTILES, (quantile + 1) / _NUM_QUANTILES
    total, place, at = 0.0, min(bisect_left(ends, begin), len(ends) - 1), begin
    while at < end and place < len(ends):
        upto = end if place == len(ends) - 1 else min(end, ends[place])
        total += lengths.pairs[place][0] * max(0.0, upto - at)
        at, place = max(at, upto), place + 1
    return max(1.0, total * _NUM_QUANTILES)


def _length(value: float, *, up: bool) -> int:
    return _on_grid(value, _LENGTHS_PER_OCTAVE, up=up)


def _on_grid(value: float, per_octave: int, *, up: bool = False) -> int:
    """The nearest power of `2 ** (1 / per_octave)`, or the next one up, as a whole number."""
    exponent = math.log2(max(1.0, value)) * per_octave
    whole = math.ceil(exponent - _ROUNDING) if up else round(exponent)
    near = 2 ** (whole / per_octave)
    return math.ceil(near - _ROUNDING) if up else round(near)
