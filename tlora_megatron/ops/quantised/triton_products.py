"""Kernels of `ops.quantised.weight`: products of FP8 codes on any GPU with tensor cores.

Tensor cores add products of FP8 in fewer bits than fp32 has, so each 128 of the contraction are a
product of their own, and those are added in fp32. Tiles do not depend on the number of rows, so
neither does what a row gets. The weight must lie with the contraction in its rows; for the input
gradient it is transposed into memory that is freed afterwards.

Shapes: T rows, K features in, N features out; D depth of the contraction, C columns of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.quantised.rows import GROUP, QuantRows
from tlora_megatron.ops.quantised.triton_rows import decode, decodes_by_hand
from tlora_megatron.ops.warm_kernel import WarmKernel

_BLOCK_ROWS = 128
_BLOCK_COLUMNS = 128
"""The width of a block of scales, so that a tile needs one scale at a time."""
_BAND = 8
"""Blocks of rows that run through all columns together, so that W comes from the L2 cache."""
_STAGES = 3
_WARPS = 8
_NO_SCALES, _COLUMN_SCALES, _BLOCK_SCALES = 0, 1, 2


@triton.jit
def _tile(
    num_rows: tl.tensor, NUM_COLUMNS: tl.constexpr, BM: tl.constexpr, BAND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the block of rows and the block of columns that a program takes."""
    across: tl.constexpr = (NUM_COLUMNS + 127) // 128
    first = tl.program_id(0) // (BAND * across) * BAND
    size = tl.minimum(tl.cdiv(num_rows, BM) - first, BAND)
    place = tl.program_id(0) % (BAND * across)
    return first + place % size, place // size


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    codes: tl.tensor,  # uint8 [T, DEPTH]
    scales: tl.tensor,  # fp32 [T], or [T, ceil(DEPTH / 128)] with ROW_GROUPS
    weight: tl.tensor,  # uint8 [NUM_COLUMNS, DEPTH]
    weight_scales: tl.tensor,  # fp32 [NUM_COLUMNS], or of blocks
    onto: tl.tensor,  # as out, with ADDS
    out: tl.tensor,  # [T, NUM_COLUMNS]
    num_rows: tl.tensor,
    one: tl.tensor,  # 1.0: what is multiplied cannot be made the addend of the next product
    NUM_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,  # of scales of blocks, from one to that of the next columns
    DEPTH_STRIDE: tl.constexpr,
    ADDS: tl.constexpr,
    BY_HAND: tl.constexpr,
    BM: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    groups: tl.constexpr = (DEPTH + 127) // 128
    row_block, column_block = _tile(num_rows, NUM_COLUMNS, BM, BAND)
    rows = row_block.to(tl.int64) * BM + tl.arange(0, BM)
    columns = column_block.to(tl.int64) * 128 + tl.arange(0, 128)
    live = rows < num_rows
    inside = columns < NUM_COLUMNS
    depth = tl.arange(0, 128)
    total = tl.zeros([BM, 128], dtype=tl.float32)
    for group in tl.range(0, groups, num_stages=STAGES):
        there = group * 128 + depth < DEPTH
        at = codes + group * 128 + rows[:, None] * DEPTH + depth[None, :]
        left = tl.load(at, mask=live[:, None] & there[None, :], other=0)
        at = weight + group * 128 + columns[None, :] * DEPTH + depth[:, None]
        right = tl.load(at, mask=there[:, None] & inside[None, :], other=0)
        part = tl.dot(decode(left, BY_HAND), decode(right, BY_HAND))
        factor = one
        if SCALES == 2:
            at_block = column_block * COLUMN_STRIDE + group * DEPTH_STRIDE
            factor = tl.load(weight_scales + at_block)
        if ROW_GROUPS:
            of_rows = tl.load(scales + rows * groups + group, mask=live, other=0.0)
            total += part * (of_rows * factor)[:, None]
        else:
            total += part * factor
    factors = tl.full([BM, 128], 1.0, dtype=tl.float32)
    if not ROW_GROUPS:
        factors *= tl.load(scales + rows, mask=live, other=0.0)[:, None]
    if SCALES == 1:
        factors *= tl.load(weight_scales + columns, mask=inside, other=0.0)[None, :]
    total *= factors
    offsets = rows[:, None] * NUM_COLUMNS + columns[None, :]
    mask = live[:, None] & inside[None, :]
    if ADDS:
        total += tl.load(onto + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _transpose_kernel(
    source: tl.tensor,  # uint8 [HEIGHT, WIDTH]
    target: tl.tensor,  # uint8 [WIDTH, HEIGHT]
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    across: tl.constexpr = (WIDTH + 127) // 128
    rows = (tl.program_id(0) // across).to(tl.int64) * 128 + tl.arange(0, 128)
    columns = (tl.program_id(0) % across).to(tl.int64) * 128 + tl.arange(0, 128)
    inside = (rows < HEIGHT)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(source + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0)
    at = target + columns[:, None] * HEIGHT + rows[None, :]
    tl.store(at, tl.trans(values), mask=tl.trans(inside))


_product = WarmKernel(_product_kernel)
_transpose = WarmKernel(_transpose_kernel)


def launch_forward(
    rows: QuantRows, codes_NK: Tensor, scales: Tensor, dtype: torch.dtype, onto_TN: Tensor | None
) -> Tensor:
    """Returns `definition.forward_product` in `dtype`; added to `onto_TN`, in place, if given."""
    kind = _COLUMN_SCALES if scales.dim() == 1 else _BLOCK_SCALES
    strides = (0, 0) if scales.dim() == 1 else (scales.shape[1], 1)
    return _launch(rows, codes_NK, scales, (kind, *strides), dtype, onto_TN)


def launch_input_gradient(
    rows: QuantRows, codes_NK: Tensor, scales: Tensor, dtype: torch.dtype, onto_TK: Tensor | None
) -> Tensor:
    """Returns `definition.input_gradient` in `dtype`; added to `onto_TK`, in place, if given."""
    kind = _NO_SCALES if scales.dim() == 1 else _BLOCK_SCALES
    strides = (0, 0) if scales.dim() == 1 else (1, scales.shape[1])
    return _launch(rows, transposed(codes_NK), scales, (kind, *strides), dtype, onto_TK)


def transposed(codes_NK: Tensor) -> Tensor:
    """Returns contiguous bytes `[K, N]`."""
    height, width = codes_NK.shape
    target = codes_NK.new_empty(width, height)
    blocks = triton.cdiv(height, 128) * triton.cdiv(width, 128)
    _transpose.launch(blocks, (codes_NK, target), (), (height, width), num_warps=_WARPS)
    return target


def _launch(
    rows: QuantRows,
    codes_CD: Tensor,
    scales: Tensor,
    layout: tuple[int, int, int],
    dtype: torch.dtype,
    onto_TC: Tensor | None,
) -> Tensor:
    """Multiplies rows with those of a weight.

    Args:
        layout: which scales the weight has, and those of blocks their strides.
    """
    num_rows, (num_columns, depth) = len(rows.codes_TK), codes_CD.shape
    assert onto_TC is None or onto_TC.is_contiguous(), "onto must be contiguous"
    out_TC = onto_TC
    if out_TC is None:
        out_TC = torch.empty(num_rows, num_columns, dtype=dtype, device=codes_CD.device)
    blocks = -(-num_rows // _BLOCK_ROWS) * -(-num_columns // _BLOCK_COLUMNS)
    if not blocks:
        return out_TC
    _product.launch(
        blocks,
        (rows.codes_TK, rows.scales, codes_CD, scales, out_TC, out_TC),
        (num_rows, 1.0),
        (num_columns, depth, rows.group == GROUP, *layout, onto_TC is not None,
         decodes_by_hand(codes_CD.device), _BLOCK_ROWS, _BAND, _STAGES),
        num_warps=_WARPS,
    )  # fmt: skip
    return out_TC
