"""Kernels of what lies around the experts' products: rows spread, weighed, and summed again."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns, OuterSide, OuterTarget, PlacedRows
from tlora_megatron.ops.experts.triton_products import down, up
from tlora_megatron.ops.experts.triton_sums import add_sums
from tlora_megatron.ops.experts.triton_tiles import (
    Placed,
    RankRows,
    RankTables,
    rank_rows,
    tiles_of,
)
from tlora_megatron.ops.frozen.swiglu_triton import gradients, product
from tlora_megatron.ops.warm_kernel import WarmKernel

_BLOCK = 1024
"""Columns that a program reads at once: 8 a thread, one load of 16 bytes each."""


@triton.jit
def _spread_kernel(
    x: tl.tensor,  # [T, H]
    rows: tl.tensor,  # int64 [R]
    out: tl.tensor,  # [R, H]
    H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    place = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + tl.load(rows + place) * H + columns, mask=columns < H, other=0.0)
    tl.store(out + place * H + columns, values, mask=columns < H)


@triton.jit
def _sum_kernel(
    y: tl.tensor,  # [R, H]
    places: tl.tensor,  # int64 [T, K]
    out: tl.tensor,  # [T, H]
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(K):
        place = tl.load(places + row * K + choice)
        total += tl.load(y + place * H + columns, mask=columns < H, other=0.0).to(tl.float32)
    tl.store(out + row * H + columns, total.to(out.dtype.element_ty), mask=columns < H)


@triton.jit
def _weighted_kernel(
    inner: tl.tensor,  # [Q, 2 I]
    weights: tl.tensor,  # [Q]
    out: tl.tensor,  # [Q, I]
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (I + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = inner + row * 2 * I + columns
    gate = tl.load(at, mask=columns < I, other=0.0).to(tl.float32)
    up = tl.load(at + I, mask=columns < I, other=0.0).to(tl.float32)
    hidden = product(gate, up) * tl.load(weights + row).to(tl.float32)
    tl.store(out + row * I + columns, hidden.to(out.dtype.element_ty), mask=columns < I)


@triton.jit
def _weighted_back_kernel(
    grad: tl.tensor,  # [Q, I]
    inner: tl.tensor,  # [Q, 2 I]
    weights: tl.tensor,  # [Q]
    dinner: tl.tensor,  # as inner
    dweights: tl.tensor,  # fp32 [Q]
    result: tl.tensor,  # [Q, I], or as inner
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
    RESULT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, I, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < I
        begin = row * 2 * I + columns
        g = tl.load(grad + row * I + columns, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(inner + begin, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + begin + I, mask=inside, other=0.0).to(tl.float32)
        hidden = product(gate, up)
        sums += g * hidden
        if RESULT:
            weighted = (hidden * weight).to(result.dtype.element_ty)
            tl.store(result + row * I + columns, weighted, mask=inside)
        dgate, dup = gradients(g * weight, gate, up)
        tl.store(dinner + begin, dgate.to(dinner.dtype.element_ty), mask=inside)
        tl.store(dinner + begin + I, dup.to(dinner.dtype.element_ty), mask=inside)
    tl.store(dweights + row, tl.sum(sums, 0))


_spread = WarmKernel(_spread_kernel)
_sum = WarmKernel(_sum_kernel)
_weighted = WarmKernel(_weighted_kernel)
_weighted_back = WarmKernel(_weighted_back_kernel)


def spread_rows(x_TH: Tensor, rows_R: Tensor) -> Tensor:
    """Returns `x[rows]` `[R, H]`."""
    x_TH, width = x_TH.contiguous(), x_TH.shape[1]
    out_RH = x_TH.new_empty(len(rows_R), width)
    _spread.launch(
        len(rows_R) * triton.cdiv(width, _BLOCK),
        (x_TH, rows_R, out_RH),
        (),
        (width, _BLOCK),
        num_warps=4,
    )
    return out_RH


def sum_rows(y_RH: Tensor, places_TK: Tensor) -> Tensor:
    """Returns the sum over a row's places `[T, H]`, in fp32 and their order."""
    y_RH, width = y_RH.contiguous(), y_RH.shape[1]
    num_rows, choices = places_TK.shape
    out_TH = y_RH.new_empty(num_rows, width)
    _sum.launch(
        num_rows * triton.cdiv(width, _BLOCK),
        (y_RH, places_TK, out_TH),
        (),
        (width, choices, _BLOCK),
        num_warps=4,
    )
    return out_TH


def weighted_swiglu(inner_QI: Tensor, weights_Q: Tensor) -> Tensor:
    """Returns `w * silu(gate) * up` `[Q, I]`, rounded once."""
    inner_QI, width = inner_QI.contiguous(), inner_QI.shape[1] // 2
    out_QI = inner_QI.new_empty(len(inner_QI), width)
    _weighted.launch(
        len(inner_QI) * triton.cdiv(width, _BLOCK),
        (inner_QI, weights_Q.contiguous(), out_QI),
        (),
        (width, _BLOCK),
        num_warps=4,
    )
    return out_QI


def weighted_swiglu_back(
    grad_QI: Tensor, inner_QI: Tensor, weights_Q: Tensor, *, with_result: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of gate and up `[Q, 2 I]`, and of the weights, fp32 `[Q]`.

    Args:
        with_result: the third value is `weighted_swiglu` then, else None.
    """
    inner_QI, width = inner_QI.contiguous(), inner_QI.shape[1] // 2
    dinner_QI = torch.empty_like(inner_QI)
    dweights_Q = inner_QI.new_empty(len(inner_QI), dtype=torch.float32)
    result_QI = torch.empty_like(grad_QI) if with_result else None
    written = dinner_QI if result_QI is None else result_QI
    _weighted_back.launch(
        len(inner_QI),
        (grad_QI.contiguous(), inner_QI, weights_Q.contiguous(), dinner_QI, dweights_Q, written),
        (),
        (width, min(_BLOCK, triton.next_power_of_2(width)), int(with_result)),
        num_warps=4,
    )
    return dinner_QI, dweights_Q, result_QI


def shrink(x_QC: Tensor, runs: ExpertRuns, side: OuterSide, width: int) -> Tensor:
    """Returns `x w^T` of each run's rows, `[Q, width]`; zeros elsewhere."""
    tables, tiles = _tables_of(side, width, x_QC.device), tiles_of(runs, len(x_QC), x_QC.device)
    out_QR = x_QC.new_zeros(len(x_QC), width)
    return down(PlacedRows(x_QC.contiguous()), tables.lora_a, tables, tiles, out_QW=out_QR)


def expand(s_QR: Tensor, y_QC: Tensor, runs: ExpertRuns, side: OuterSide) -> None:
    """Adds `s w` to y in the rows of each run."""
    tables = _tables_of(side, s_QR.shape[1], y_QC.device)
    up(y_QC, s_QR.contiguous(), tables.lora_a, tables, tiles_of(runs, len(y_QC), y_QC.device))


def add_gradients(s_QR: Tensor, x_QC: Tensor, runs: ExpertRuns, side: OuterSide) -> None:
    """Adds `s^T x` of each run's rows to the gradients of its factors, in ascending order."""
    tables = _tables_of(side, s_QR.shape[1], x_QC.device)
    tiles = tiles_of(runs, len(x_QC), x_QC.device)
    add_sums(tables.grad_a, s_QR.contiguous(), PlacedRows(x_QC.contiguous()), tables, tiles)


def scale(s_QR: Tensor, runs: ExpertRuns, scaling: Tensor) -> Tensor:
    """Multiplies each row by its adapter's scaling, in place; those of none by 0."""
    begins = tiles_of(runs, len(s_QR), s_QR.device).begins
    assert len(begins) == len(scaling) + 2, "runs of a micro-batch's own rows"
    of_slots = torch.cat([scaling, scaling.new_zeros(1)])
    of_rows = of_slots.repeat_interleave(begins.diff().long(), output_size=len(s_QR))
    return s_QR.mul_(of_rows[:, None])


_known: WeakKeyDictionary[OuterSide, RankTables] = WeakKeyDictionary()


def _tables_of(side: OuterSide, width: int, device: torch.device) -> RankTables:
    """Returns the tables of one side of a linear, made once."""
    if side not in _known:

        def placed(pick: Callable[[OuterTarget], Tensor]) -> RankRows:
            slots = [
                [Placed(t.ranks.start, t.columns.start, pick(t)) for t in targets]
                for targets in side.targets
            ]
            return rank_rows(slots, width, device)

        widths = [max((t.ranks.stop for t in targets), default=0) for targets in side.targets]
        widths_S = torch.tensor(widths, dtype=torch.int32, device=device)
        rows, grad_rows = placed(lambda t: t.weight), placed(lambda t: t.grad)
        _known[side] = RankTables(
            slots=len(widths),
            width=width,
            widths_S=widths_S,
            lora_a=rows,
            lora_b=rows,
            grad_a=grad_rows,
            grad_b=grad_rows,
            scaling_S=torch.ones(len(widths), device=device),
            positions=widths_S,
        )
    return _known[side]
