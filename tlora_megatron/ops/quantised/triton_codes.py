"""Makes FP8 codes of values that a Triton kernel holds, to the bit as `ops.quantised.rows` does."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

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
    values: tl.tensor,
    fold: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
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
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [values],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


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
