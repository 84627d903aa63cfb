"""Sums over runs of rows in an order that is a run's own: a thread block a run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _segment_sums_kernel(
    values: tl.tensor,  # fp32 [T]
    ends: tl.tensor,  # int64 [G]
    sums: tl.tensor,  # fp32 [G]
    BLOCK: tl.constexpr,
) -> None:
    run = tl.program_id(0)
    begin = tl.load(ends + run - 1, mask=run > 0, other=0)
    end = tl.load(ends + run)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    while begin < end:
        rows = begin + tl.arange(0, BLOCK)
        total += tl.load(values + rows, mask=rows < end, other=0.0).to(tl.float64)
        begin += BLOCK
    tl.store(sums + run, tl.sum(total, axis=0).to(tl.float32))


def launch_segment_sums(values_T: Tensor, ends_G: Tensor) -> Tensor:
    """Returns the sums of consecutive runs, fp32 `[G]`, added in fp64 from each run's first row."""
    sums_G = values_T.new_empty(len(ends_G), dtype=torch.float32)
    if len(ends_G):
        _segment_sums_kernel[(len(ends_G),)](values_T, ends_G, sums_G, BLOCK=_BLOCK, num_warps=4)
    return sums_G
