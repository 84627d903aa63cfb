"""Makes FP8 codes in Triton kernels, to the bit as `ops.quantised.rows` does."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.warm_kernel import WarmKernel

_ROUNDS_CAPABILITY = (9, 0)
"""From Hopper on Triton rounds fp32 to e4m3 at once; for Ada it cuts values to fp16 first, which
moves some of those in the middle between two codes."""
_MULTIPLIES_CAPABILITY = (8, 9)
"""From Ada on tensor cores take e4m3."""


def rounds_by_hand(device: torch.device) -> bool:
    """Returns True where codes are made by integer arithmetic."""
    return _capability(device) < _ROUNDS_CAPABILITY


def decodes_by_hand(device: torch.device) -> bool:
    """Returns True where codes are multiplied as fp16, which holds their values."""
    return _capability(device) < _MULTIPLIES_CAPABILITY


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) for Triton's interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@triton.jit
def abs_bits(values: tl.tensor) -> tl.tensor:
    """Absolute fp32 values as integers, whose order is the same and puts NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest: tl.tensor) -> tl.tensor:
    """The scale of values whose largest `abs_bits` are given."""
    quotient = tl.math.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    scale = tl.maximum(quotient, 7.888609052210118e-31)  # rows.SMALLEST_SCALE
    return tl.where(largest >= 0x7F800000, float("nan"), scale)


@triton.jit
def encode(values: tl.tensor, BY_HAND: tl.constexpr) -> tl.tensor:
    """The codes, as uint8, of fp32 values that are at most 448 (but for rounding) or NaN."""
    if BY_HAND:
        return _encode_by_hand(values)
    else:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _encode_by_hand(values: tl.tensor) -> tl.tensor:
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Nearest even of 3 mantissa bits, and the exponent counted from 7 instead of 127.
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # Multiples of 2^-9, which is what the last bit of fp32 stands for from 2^14 on.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def decode(codes: tl.tensor, BY_HAND: tl.constexpr) -> tl.tensor:
    """Turns uint8 codes into what `tl.dot` takes: the same bytes as e4m3, or values in fp16."""
    if BY_HAND:
        return _decode_by_hand(codes)
    else:
        return codes.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _decode_by_hand(codes: tl.tensor) -> tl.tensor:
    wide = codes.to(tl.int16)
    # The exponent is counted from 15 instead of 7.
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    values = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), values).to(tl.float16)


@triton.jit
def times_fold(
    values: tl.tensor, fold: tl.tensor, columns: tl.tensor, num_rows: tl.tensor,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Multiplies fp32 values with the factors of their columns, which stay in the L1 cache."""
    if STAGES == 1:
        values *= tl.load(fold + columns, mask=columns < WIDTH, other=0.0)
    else:
        # Always true. In a branch, because otherwise Triton would fetch these ahead, with rows.
        if num_rows > 0:
            values *= tl.load(fold + columns, mask=columns < WIDTH, other=0.0)
    return values


@triton.jit
def narrow(values: tl.tensor, dtype: tl.constexpr, BY_HAND: tl.constexpr) -> tl.tensor:
    """Rounds fp32 values that are then read again: to bf16 in pairs, as fast as they are made.

    One by one they take the unit of exponentials, with a quarter of the rate.
    """
    if BY_HAND or dtype != tl.bfloat16:
        return values.to(dtype)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [values], dtype=tl.bfloat16, is_pure=True,
            pack=2,
        )  # fmt: skip


@triton.jit
def code_columns(COLUMNS: tl.constexpr) -> tl.tensor:
    """Columns to store codes at: 8 a thread, as 16 bytes of the values that they are made of.

    Threads that stored 16 codes would read and write values with gaps between neighbours.
    """
    return tl.max_contiguous(tl.arange(0, COLUMNS), 8)


@triton.jit
def store_codes(
    values: tl.tensor,  # fp32 [ROWS, COLUMNS], 0 beyond WIDTH
    codes: tl.tensor,  # uint8 [T, WIDTH]
    scales: tl.tensor,  # fp32 [T], or [T, ceil(WIDTH / GROUP)]
    rows: tl.tensor,  # int64 [ROWS]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a multiple of GROUP
    GROUP: tl.constexpr,  # columns that share a scale; 0: all
    BY_HAND: tl.constexpr,
) -> None:
    """Quantises whole rows, and writes codes and scales."""
    if GROUP == 0:
        scale = scale_of(tl.max(abs_bits(values), axis=1))
        tl.store(scales + rows, scale, mask=rows < num_rows)
        result = encode(values * tl.math.div_rn(1.0, scale)[:, None], BY_HAND)
    else:
        parts: tl.constexpr = COLUMNS // GROUP
        groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        apart = tl.reshape(values, [ROWS, parts, GROUP])
        scale = scale_of(tl.max(abs_bits(apart), axis=2))
        part = tl.arange(0, parts)
        at = rows[:, None] * groups + part[None, :]
        tl.store(scales + at, scale, mask=(rows < num_rows)[:, None] & (part < groups)[None, :])
        inverse = tl.math.div_rn(1.0, scale)[:, :, None]
        result = tl.reshape(encode(apart * inverse, BY_HAND), [ROWS, COLUMNS])
    columns = code_columns(COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    tl.store(codes + rows[:, None] * WIDTH + columns[None, :], result, mask=inside)


_GROUP = 128
"""Columns that may share a scale: no tile has fewer."""
_TILE = 4096
"""Values of a thread block where rows are narrower. Of wider rows few blocks fit a multiprocessor:
those stay on it, and copy their next rows to shared memory while they work on one."""
_REDUCTION_BYTES = 4096
"""Shared memory that reductions take, at most."""


@triton.jit(do_not_specialize=["num_rows"])
def _encode_kernel(
    x: tl.tensor,  # [num_rows, WIDTH]
    fold: tl.tensor,  # fp32 [WIDTH], with FOLDS
    codes: tl.tensor,  # uint8 [num_rows, WIDTH]
    scales: tl.tensor,  # fp32 [num_rows], or [num_rows, ceil(WIDTH / GROUP)]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FOLDS: tl.constexpr,
    BY_HAND: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, COLUMNS)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        rows = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
        at = rows[:, None] * WIDTH + columns[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if FOLDS:
            values = times_fold(values, fold, columns[None, :], num_rows, WIDTH, STAGES)
        store_codes(
            values, codes, scales, rows, num_rows, WIDTH, ROWS, COLUMNS, GROUP, BY_HAND
        )  # fmt: skip


_encode = WarmKernel(_encode_kernel, caches=True)


class RowTile(NamedTuple):
    """How a row kernel is launched."""

    rows: int
    columns: int
    num_warps: int
    stages: int
    """1 = a block for each tile; 3 = blocks of 32 warps in all stay on each multiprocessor, and
    fetch rows ahead into two buffers. With one, a row would be fetched when the one before is done.
    """

    def blocks(self, x: torch.Tensor) -> int:
        """Returns the number of blocks for the rows of x."""
        needed = -(-len(x) // self.rows)
        return needed if self.stages == 1 else min(needed, _resident(x.device, self.num_warps))


def row_tile(x_TK: torch.Tensor) -> RowTile:
    """Chooses the tile of the quantiser: 16 values a thread, 32 where rows are wide."""
    width = x_TK.shape[1]
    columns = max(_GROUP, power_of_2(width))
    rows = max(1, _TILE // columns)
    if columns <= _TILE:
        return RowTile(rows, columns, max(1, rows * columns // 512), 1)
    stages = _stages(columns * x_TK.element_size(), x_TK.device)
    return RowTile(1, columns, min(32, columns // 1024), stages)


def whole_rows(x: torch.Tensor, width: int, operands: int) -> RowTile:
    """Chooses the tile of kernels that take whole rows of several operands.

    Args:
        operands: rows of `width` columns in the dtype of x that are read for each row written.
    """
    columns = max(_GROUP, power_of_2(width))
    stages = _stages(operands * columns * x.element_size(), x.device)
    return RowTile(1, columns, max(1, min(32, columns // 256)), stages)


def launch_encode(
    x_TK: torch.Tensor,
    group: int | None,
    fold_K: torch.Tensor | None,
    tile: RowTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes and scales of `encode_rows`.

    Args:
        x_TK: contiguous.
        tile: None = that of `row_tile`.
    """
    num_rows, width = x_TK.shape
    codes, scales = empty_codes(x_TK, group)
    tile = row_tile(x_TK) if tile is None else tile
    if not num_rows:
        return codes, scales
    _encode.launch(
        tile.blocks(x_TK),
        (x_TK, scales if fold_K is None else fold_K, codes, scales),
        (num_rows,),
        (
            width,
            tile.rows,
            tile.columns,
            group or 0,
            fold_K is not None,
            rounds_by_hand(x_TK.device),
            tile.stages,
        ),
        num_warps=tile.num_warps,
    )
    return codes, scales


def empty_codes(x_TK: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for the codes and the scales of rows."""
    num_rows, width = x_TK.shape
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=x_TK.device)
    shape = (num_rows,) if group is None else (num_rows, -(-width // group))
    return codes, torch.empty(shape, dtype=torch.float32, device=x_TK.device)


@functools.cache
def power_of_2(size: int) -> int:
    """Returns the next power of two; Triton's own function is slow to call."""
    return triton.next_power_of_2(size)


@functools.cache
def _stages(row_bytes: int, device: torch.device) -> int:
    """Returns `RowTile.stages`: whether two buffers fit the shared memory of a block."""
    if device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
    return 3 if 2 * row_bytes + _REDUCTION_BYTES <= shared_bytes else 1


@functools.cache
def _resident(device: torch.device, num_warps: int) -> int:
    """Returns how many blocks stay on a device: 32 warps on each multiprocessor."""
    if device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * max(1, 32 // num_warps)
