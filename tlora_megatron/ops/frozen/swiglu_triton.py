"""Kernels of `ops.frozen.parts`; before a linear in FP8 they also quantise their rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.quantised.rows import (
    ONE_SCALE,
    PARTS,
    OneScale,
    QuantRows,
    find_largest,
    hand_rows,
)
from tlora_megatron.ops.quantised.triton_rows import (
    abs_bits,
    code_columns,
    empty_codes,
    encode,
    narrow,
    rounds_by_hand,
    scale_of,
    store_codes,
    times_fold,
    whole_rows,
)
from tlora_megatron.ops.quantised.triton_tensor_scale import keep_largest, sizes_of
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.ops.warm_kernel import WarmKernel

_BLOCK = 1024
"""Columns of a thread block: 8 a thread, one load of 16 bytes each of gate and up."""
_WARPS = 4


@triton.jit
def product(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """`silu(gate) * up`."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def gradients(grad: tl.tensor, gate: tl.tensor, up: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu


@triton.jit
def _forward_kernel(
    x: tl.tensor,  # [T, 2 * WIDTH]
    y: tl.tensor,  # [T, WIDTH]
    parts: tl.tensor,  # int32 [PARTS], where there are any
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = nobody asks for the largest magnitude
) -> None:
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = x + row * 2 * WIDTH + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = product(gate, up).to(y.dtype.element_ty)
    tl.store(y + row * WIDTH + columns, result, mask=inside)
    if PARTS:
        keep_largest(sizes_of(result), parts, PARTS)


@triton.jit
def _backward_kernel(
    dy: tl.tensor,  # [T, WIDTH]
    x: tl.tensor,  # [T, 2 * WIDTH]
    dx: tl.tensor,  # as x
    parts: tl.tensor,  # int32 [PARTS], where there are any
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = nobody asks for the largest magnitude
) -> None:
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    begin = row * 2 * WIDTH + columns
    grad = tl.load(dy + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + begin, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + begin + WIDTH, mask=inside, other=0.0).to(tl.float32)
    dgate, dup = gradients(grad, gate, up)
    dgate = dgate.to(dx.dtype.element_ty)
    dup = dup.to(dx.dtype.element_ty)
    tl.store(dx + begin, dgate, mask=inside)
    tl.store(dx + begin + WIDTH, dup, mask=inside)
    if PARTS:
        keep_largest(tl.maximum(sizes_of(dgate), sizes_of(dup)), parts, PARTS)


_forward = WarmKernel(_forward_kernel)
_backward = WarmKernel(_backward_kernel)


_FORWARD_COLUMNS, _BACKWARD_COLUMNS = 32768, 16384
"""The widest gates whose rows, and those of whose gradients, fit the registers of a block."""


@triton.jit(do_not_specialize=["num_rows"])
def _forward_codes_kernel(
    x: tl.tensor,  # [T, 2 * WIDTH]
    y: tl.tensor,  # [T, WIDTH]
    codes: tl.tensor,  # uint8, as y
    scales: tl.tensor,  # fp32 [T], or [T, ceil(WIDTH / GROUP)]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BY_HAND: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = columns < WIDTH
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=STAGES):
        rows = (row + tl.arange(0, 1)).to(tl.int64)
        at = x + rows[:, None] * (2 * WIDTH) + columns
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
        result = narrow(product(gate, up), y.dtype.element_ty, BY_HAND)
        tl.store(y + rows[:, None] * WIDTH + columns, result, mask=inside)
        values = result.to(tl.float32)
        store_codes(values, codes, scales, rows, num_rows, WIDTH, 1, COLUMNS, GROUP, BY_HAND)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_codes_kernel(
    dy: tl.tensor,  # [T, WIDTH]
    x: tl.tensor,  # [T, 2 * WIDTH]
    dx: tl.tensor,  # as x
    fold: tl.tensor,  # fp32 [2 * WIDTH], with FOLDS
    codes: tl.tensor,  # uint8, as x
    scales: tl.tensor,  # fp32 [T]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLDS: tl.constexpr,
    BY_HAND: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = columns < WIDTH
    code_places = code_columns(COLUMNS)[None, :]
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=STAGES):
        rows = (row + tl.arange(0, 1)).to(tl.int64)
        begin = rows[:, None] * (2 * WIDTH) + columns
        grad = tl.load(dy + rows[:, None] * WIDTH + columns, mask=inside, other=0.0)
        gate = tl.load(x + begin, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + begin + WIDTH, mask=inside, other=0.0).to(tl.float32)
        dgate, dup = gradients(grad.to(tl.float32), gate, up)
        dgate = narrow(dgate, dx.dtype.element_ty, BY_HAND)
        dup = narrow(dup, dx.dtype.element_ty, BY_HAND)
        tl.store(dx + begin, dgate, mask=inside)
        tl.store(dx + begin + WIDTH, dup, mask=inside)
        dgate = dgate.to(tl.float32)
        dup = dup.to(tl.float32)
        if FOLDS:
            dgate = times_fold(dgate, fold, columns, num_rows, WIDTH, STAGES)
            dup = times_fold(dup, fold + WIDTH, columns, num_rows, WIDTH, STAGES)
        sizes = tl.maximum(tl.abs(dgate), tl.abs(dup), propagate_nan=tl.PropagateNan.ALL)
        scale = scale_of(tl.max(abs_bits(sizes), axis=1))
        tl.store(scales + rows, scale)
        inverse = tl.math.div_rn(1.0, scale)[:, None]
        at = codes + rows[:, None] * (2 * WIDTH) + code_places
        tl.store(at, encode(dgate * inverse, BY_HAND), mask=inside)
        tl.store(at + WIDTH, encode(dup * inverse, BY_HAND), mask=inside)


_forward_with_codes = WarmKernel(_forward_codes_kernel)
_backward_with_codes = WarmKernel(_backward_codes_kernel, caches=True)


def launch_forward(x: torch.Tensor, row: QuantWeight | OneScale | None = None) -> torch.Tensor:
    """Returns `silu(gate) * up` of contiguous `[..., 2 F]`, with what it carries for `row`."""
    width = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], width)
    if isinstance(row, QuantWeight) and width <= _FORWARD_COLUMNS:
        codes, scales = empty_codes(y, row.group)
        tile = whole_rows(x, width, operands=2)
        if len(x):
            _forward_with_codes.launch(
                tile.blocks(x),
                (x, y, codes, scales),
                (len(x),),
                (width, tile.columns, row.group or 0, rounds_by_hand(x.device), tile.stages),
                num_warps=tile.num_warps,
            )
        hand_rows(y, QuantRows(codes, scales))
        return y
    blocks = -(-width // _BLOCK) * (y.numel() // width)
    parts = find_largest(y) if row is ONE_SCALE else y
    constants = (width, _BLOCK, PARTS if row is ONE_SCALE else 0)
    _forward.launch(blocks, (x, y, parts), (), constants, num_warps=_WARPS)
    return y


def launch_backward(
    dy: torch.Tensor, x: torch.Tensor, column: QuantWeight | OneScale | None = None
) -> torch.Tensor:
    """Returns the gradient of contiguous `[..., 2 F]`, with what it carries for `column`."""
    width = x.shape[-1] // 2
    dx = torch.empty_like(x)
    if isinstance(column, QuantWeight) and width <= _BACKWARD_COLUMNS:
        fold, (codes, scales) = column.fold_N, empty_codes(dx, None)
        tile = whole_rows(x, width, operands=3)
        if len(x):
            _backward_with_codes.launch(
                tile.blocks(x),
                (dy, x, dx, scales if fold is None else fold, codes, scales),
                (len(x),),
                (width, tile.columns, fold is not None, rounds_by_hand(x.device), tile.stages),
                num_warps=tile.num_warps,
            )
        hand_rows(dx, QuantRows(codes, scales), fold)
        return dx
    blocks = -(-width // _BLOCK) * (dy.numel() // width)
    parts = find_largest(dx) if column is ONE_SCALE else dx
    constants = (width, _BLOCK, PARTS if column is ONE_SCALE else 0)
    _backward.launch(blocks, (dy, x, dx, parts), (), constants, num_warps=_WARPS)
    return dx
