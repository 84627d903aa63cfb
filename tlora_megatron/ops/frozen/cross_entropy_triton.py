"""Kernels of `ops.frozen.losses`: a thread block a row of logits, or a run of losses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192
"""Columns read at once: 16 a thread, two loads of 16 bytes."""
_WARPS = 16


@triton.jit
def _write_gradient(
    row: tl.tensor,
    label: tl.tensor,
    lse: tl.tensor,
    VALID: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        value = tl.load(row + columns, mask=columns < VALID, other=-float("inf")).to(tl.float32)
        grad = tl.exp(value - lse) - tl.where(columns == label, 1.0, 0.0)
        tl.store(row + columns, grad.to(row.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _statistics_kernel(
    logits: tl.tensor,  # [n, WIDTH]
    labels: tl.tensor,  # int64 [n]
    statistics: tl.tensor,  # fp32 [3, n]
    num_rows: tl.tensor,
    VALID: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * WIDTH
    label = tl.load(labels + index)
    largest = -float("inf")
    total = 0.0
    for begin in range(0, VALID, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        value = tl.load(row + columns, mask=columns < VALID, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(value, axis=0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(value - new), axis=0)
        largest = new
    here = (label >= 0) & (label < VALID)
    target = tl.load(row + tl.where(here, label, 0), mask=here, other=0.0).to(tl.float32)
    tl.store(statistics + index, largest)
    tl.store(statistics + num_rows + index, total)
    tl.store(statistics + 2 * num_rows + index, target)
    if GRADIENT:
        # Every thread has read the target's logit before any writes over it.
        tl.debug_barrier()
        _write_gradient(row, label, largest + tl.log(total), VALID, WIDTH, BLOCK)


@triton.jit
def _gradient_kernel(
    logits: tl.tensor,  # [n, WIDTH]
    labels: tl.tensor,  # int64 [n]
    lse: tl.tensor,  # fp32 [n]
    VALID: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * WIDTH
    _write_gradient(row, tl.load(labels + index), tl.load(lse + index), VALID, WIDTH, BLOCK)


def launch_statistics(
    logits_nV: torch.Tensor, labels_n: torch.Tensor, valid: int, *, gradient: bool
) -> torch.Tensor:
    """Computes `row_statistics`; with `gradient` also writes the gradient over the logits."""
    rows, width = logits_nV.shape
    statistics = logits_nV.new_empty(3, rows, dtype=torch.float32)
    _statistics_kernel[(rows,)](
        logits_nV, labels_n, statistics, rows, VALID=valid, WIDTH=width, BLOCK=_BLOCK,
        GRADIENT=gradient, num_warps=_WARPS,
    )  # fmt: skip
    return statistics


def launch_gradient(
    logits_nV: torch.Tensor, labels_n: torch.Tensor, lse_n: torch.Tensor, valid: int
) -> None:
    """Writes `softmax - one_hot` over the logits."""
    rows, width = logits_nV.shape
    _gradient_kernel[(rows,)](
        logits_nV, labels_n, lse_n, VALID=valid, WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


_RUN_BLOCK = 1024
"""Rows that a sum over a run reads at once."""


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


def launch_segment_sums(values_T: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Returns the sums of consecutive runs, fp32 `[G]`, added in fp64 from each run's first row."""
    sums_G = values_T.new_empty(len(ends_G), dtype=torch.float32)
    if len(ends_G):
        _segment_sums_kernel[(len(ends_G),)](
            values_T, ends_G, sums_G, BLOCK=_RUN_BLOCK, num_warps=4
        )
    return sums_G
