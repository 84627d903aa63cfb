"""Kernels of `ops.frozen.rms_norm`: one pass over the rows each way; some also quantise them."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.frozen.parts import NormWeight
from tlora_megatron.ops.quantised.rows import PARTS, OneScale, QuantRows, find_largest, hand_rows
from tlora_megatron.ops.quantised.triton_rows import (
    empty_codes,
    rounds_by_hand,
    store_codes,
    times_fold,
)
from tlora_megatron.ops.quantised.triton_tensor_scale import keep_largest, sizes_of
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.ops.warm_kernel import WarmKernel

_TILE = 4096
"""Elements of a thread block where rows are narrower; a wider row has a block of its own."""


@triton.jit
def norm_rows(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, total: tl.tensor, out: tl.tensor,
    rstd: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Writes the sums and norms of a block's rows; returns the norms, `[ROWS, COLUMNS]`."""
    columns = tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = rows[:, None] * WIDTH + columns[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    tl.store(rstd + rows, scale, mask=rows < num_rows)
    normed = value * scale[:, None]
    if not ROUNDS_ONCE:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1.0
    result = (normed * factor[None, :]).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    return result


@triton.jit
def norm_gradients(
    dy: tl.tensor, dtotal: tl.tensor, x: tl.tensor, weight: tl.tensor, rstd: tl.tensor,
    dx: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_DTOTAL: tl.constexpr, ZERO_CENTERED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Writes the gradients of a block's rows; returns them, `[ROWS, COLUMNS]`."""
    columns = tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = rows[:, None] * WIDTH + columns[None, :]
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1.0
    grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * factor[None, :]
    scale = tl.load(rstd + rows, mask=rows < num_rows, other=0.0)[:, None]
    normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    share = tl.sum(grad * normed, axis=1) / WIDTH
    result = (grad - normed * share[:, None]) * scale
    if HAS_DTOTAL:
        result += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
    rounded = result.to(dx.dtype.element_ty)
    tl.store(dx + at, rounded, mask=inside)
    return rounded


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x: tl.tensor,  # [num_rows, WIDTH]
    residual: tl.tensor,  # [num_rows, WIDTH], with HAS_RESIDUAL
    weight: tl.tensor,  # [WIDTH]
    total: tl.tensor,  # as residual, with HAS_RESIDUAL
    out: tl.tensor,  # [num_rows, WIDTH]
    rstd: tl.tensor,  # fp32 [num_rows]
    parts: tl.tensor,  # int32 [PARTS], where there are any
    num_rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,  # behind the weight only
    ZERO_CENTERED: tl.constexpr,  # the weight is held less 1
    PARTS: tl.constexpr,  # 0 = nobody asks for the norm's largest magnitude
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    result = norm_rows(
        x, residual, weight, total, out, rstd, rows, num_rows, eps,
        WIDTH, COLUMNS, HAS_RESIDUAL, ROUNDS_ONCE, ZERO_CENTERED,
    )  # fmt: skip
    if PARTS:
        keep_largest(sizes_of(result), parts, PARTS)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    dy: tl.tensor,  # [num_rows, WIDTH]
    dtotal: tl.tensor,  # as x, with HAS_DTOTAL
    x: tl.tensor,  # [num_rows, WIDTH]: what was normalised
    weight: tl.tensor,  # [WIDTH]
    rstd: tl.tensor,  # fp32 [num_rows]
    dx: tl.tensor,  # as x
    parts: tl.tensor,  # int32 [PARTS], where there are any
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_DTOTAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = nobody asks for the gradient's largest magnitude
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    result = norm_gradients(
        dy, dtotal, x, weight, rstd, dx, rows, num_rows,
        WIDTH, COLUMNS, HAS_DTOTAL, ZERO_CENTERED,
    )  # fmt: skip
    if PARTS:
        keep_largest(sizes_of(result), parts, PARTS)


_forward = WarmKernel(_forward_kernel)
_backward = WarmKernel(_backward_kernel)


@functools.cache
def row_block(width: int) -> tuple[int, int, int]:
    """Rows and columns of a thread block, and its warps: 16 elements a thread."""
    columns = triton.next_power_of_2(width)
    rows = max(1, _TILE // columns)
    return rows, columns, max(1, min(32, rows * columns // 512))


@triton.jit(do_not_specialize=["num_rows"])
def _forward_codes_kernel(
    x: tl.tensor,  # as `_forward_kernel`'s
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    rstd: tl.tensor,
    codes: tl.tensor,  # uint8, as out
    scales: tl.tensor,  # fp32 [num_rows], or [num_rows, ceil(WIDTH / GROUP)]
    num_rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    GROUP: tl.constexpr,
    BY_HAND: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    result = norm_rows(
        x, residual, weight, total, out, rstd, rows, num_rows, eps,
        WIDTH, COLUMNS, HAS_RESIDUAL, ROUNDS_ONCE, ZERO_CENTERED,
    )  # fmt: skip
    values = result.to(tl.float32)
    store_codes(values, codes, scales, rows, num_rows, WIDTH, ROWS, COLUMNS, GROUP, BY_HAND)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_codes_kernel(
    dy: tl.tensor,  # as `_backward_kernel`'s
    dtotal: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    rstd: tl.tensor,
    dx: tl.tensor,
    fold: tl.tensor,  # fp32 [WIDTH], with FOLDS
    codes: tl.tensor,  # uint8, as dx
    scales: tl.tensor,  # fp32 [num_rows]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_DTOTAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    FOLDS: tl.constexpr,
    BY_HAND: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    result = norm_gradients(
        dy, dtotal, x, weight, rstd, dx, rows, num_rows,
        WIDTH, COLUMNS, HAS_DTOTAL, ZERO_CENTERED,
    )  # fmt: skip
    values = result.to(tl.float32)
    if FOLDS:
        columns = tl.arange(0, COLUMNS)[None, :]
        values = times_fold(values, fold, columns, num_rows, WIDTH, 1)
    store_codes(values, codes, scales, rows, num_rows, WIDTH, ROWS, COLUMNS, 0, BY_HAND)


_forward_with_codes = WarmKernel(_forward_codes_kernel)
_backward_with_codes = WarmKernel(_backward_codes_kernel)


def launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: NormWeight,
    out: torch.Tensor,
    column: QuantWeight | OneScale | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the norm of `x + residual`, or of x; returns what is normed, and fp32 `1 / rms` a row.

    Args:
        x: `[..., H]`, contiguous, as `residual`, whose dtype is the sum's.
        out: takes the norm, and what it carries for `column`.
        column: reads the norm: FP8 codes for a weight, of `[T, H]` with H at least 128.
    """
    width = x.shape[-1]
    num_rows = x.numel() // width
    total = x if residual is None else torch.empty_like(residual)
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    rows, columns, warps = row_block(width)
    blocks = -(-num_rows // rows)
    tensors = (x, x if residual is None else residual, weight.weight_H, total, out, rstd)
    constants = (
        width, rows, columns, residual is not None, weight.rounds_once, weight.zero_centered,
    )  # fmt: skip
    if isinstance(column, QuantWeight):
        codes, scales = empty_codes(out, column.group)
        if num_rows:
            _forward_with_codes.launch(
                blocks,
                (*tensors, codes, scales),
                (num_rows, weight.eps),
                (*constants, column.group or 0, rounds_by_hand(x.device)),
                num_warps=warps,
            )
        hand_rows(out, QuantRows(codes, scales))
    else:
        parts = rstd if column is None else find_largest(out)
        _forward.launch(
            blocks,
            (*tensors, parts),
            (num_rows, weight.eps),
            (*constants, 0 if column is None else PARTS),
            num_warps=warps,
        )
    return total, rstd


def launch_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: NormWeight,
    rstd: torch.Tensor,
    row: QuantWeight | OneScale | None = None,
) -> torch.Tensor:
    """Returns the gradient of what was normalised, `dtotal` added, with what it carries for `row`.

    Args:
        dy: `[..., H]`, contiguous, as x and `dtotal`, which have the same dtype.
        row: the linear whose output the norm was given, and whose dgrad reads the gradient.
    """
    width = x.shape[-1]
    num_rows = x.numel() // width
    dx = torch.empty_like(x)
    rows, columns, warps = row_block(width)
    blocks = -(-num_rows // rows)
    tensors = (dy, dy if dtotal is None else dtotal, x, weight.weight_H, rstd, dx)
    constants = (width, rows, columns, dtotal is not None, weight.zero_centered)
    if isinstance(row, QuantWeight):
        fold, (codes, scales) = row.fold_N, empty_codes(dx, None)
        if num_rows:
            _backward_with_codes.launch(
                blocks,
                (*tensors, scales if fold is None else fold, codes, scales),
                (num_rows,),
                (*constants, fold is not None, rounds_by_hand(x.device)),
                num_warps=warps,
            )
        hand_rows(dx, QuantRows(codes, scales), fold)
    else:
        parts = rstd if row is None else find_largest(dx)
        _backward.launch(
            blocks,
            (*tensors, parts),
            (num_rows,),
            (*constants, 0 if row is None else PARTS),
            num_warps=warps,
        )
    return dx
