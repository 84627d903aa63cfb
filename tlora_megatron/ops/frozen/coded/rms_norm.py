"""RMSNorm both ways that also quantises its rows: the norms, and the residual stream's gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.frozen.norm_weight import NormWeight
from tlora_megatron.ops.frozen.triton.rms_norm import norm_gradients, norm_rows, row_block
from tlora_megatron.ops.quantised.handed_rows import hand_rows
from tlora_megatron.ops.quantised.rows import QuantRows
from tlora_megatron.ops.quantised.triton_codes import rounds_by_hand, store_codes, times_fold
from tlora_megatron.ops.quantised.triton_rows import empty_codes
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.ops.warm_kernel import WarmKernel


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x: tl.tensor,  # as `triton.rms_norm`'s
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
def _backward_kernel(
    dy: tl.tensor,  # as `triton.rms_norm`'s
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


_forward = WarmKernel(_forward_kernel)
_backward = WarmKernel(_backward_kernel)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: NormWeight,
    column: QuantWeight,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms `[T, H]`, H at least 128, as `triton.rms_norm.launch_forward` does; `out` has codes.

    Args:
        column: the linear that reads the norm.

    Returns:
        The sum, and fp32 `1 / rms` of its rows.
    """
    num_rows, width = x.shape
    total = x if residual is None else torch.empty_like(residual)
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    codes, scales = empty_codes(out, column.group)
    rows, columns, warps = row_block(width)
    if num_rows:
        _forward.launch(
            -(-num_rows // rows),
            (
                x, x if residual is None else residual, weight.weight_H, total, out, rstd,
                codes, scales,
            ),
            (num_rows, weight.eps),
            (
                width,
                rows,
                columns,
                residual is not None,
                weight.rounds_once,
                weight.zero_centered,
                column.group or 0,
                rounds_by_hand(x.device),
            ),
            num_warps=warps,
        )  # fmt: skip
    hand_rows(out, QuantRows(codes, scales))
    return total, rstd


def backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight_H: torch.Tensor,
    rstd: torch.Tensor,
    row: QuantWeight,
    *,
    zero_centered: bool,
) -> torch.Tensor:
    """Does what `triton.rms_norm.launch_backward` does to `[T, H]`; dx has its codes.

    Args:
        row: the linear whose output the norm was given, and whose dgrad reads dx.
    """
    num_rows, width = x.shape
    dx, fold = torch.empty_like(x), row.fold_N
    codes, scales = empty_codes(dx, None)
    rows, columns, warps = row_block(width)
    if num_rows:
        tensors = (dy, dy if dtotal is None else dtotal, x, weight_H, rstd, dx)
        _backward.launch(
            -(-num_rows // rows),
            (*tensors, scales if fold is None else fold, codes, scales),
            (num_rows,),
            (
                width,
                rows,
                columns,
                dtotal is not None,
                zero_centered,
                fold is not None,
                rounds_by_hand(x.device),
            ),
            num_warps=warps,
        )
    hand_rows(dx, QuantRows(codes, scales), fold)
    return dx
