"""Kernels of FP8 with one scale a tensor: the largest magnitude in passing, and the cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.quantised.rows import PARTS, UNIT, Largest
from tlora_megatron.ops.quantised.triton_rows import code_columns
from tlora_megatron.ops.warm_kernel import WarmKernel

_BLOCK = 8192
"""Elements of a thread block: 32 a thread."""
_WARPS = 8


@triton.jit
def sizes_of(values: tl.tensor) -> tl.tensor:
    """Magnitudes in fp32; that of a NaN is 0."""
    values = values.to(tl.float32)
    return tl.where(values == values, tl.abs(values), 0.0)


@triton.jit
def keep_largest(sizes: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr) -> None:
    """Raises one of the parts to the largest of a block's magnitudes."""
    largest = tl.max(sizes).to(tl.int32, bitcast=True)
    tl.atomic_max(parts + tl.program_id(0) % PARTS, largest, sem="relaxed")


@triton.jit(do_not_specialize=["units"])
def _cast_kernel(
    x: tl.tensor,  # [units * UNIT]
    parts: tl.tensor,  # int32 [PARTS]
    codes: tl.tensor,  # uint8, as x
    inverse: tl.tensor,  # fp32 [1]
    units: tl.tensor,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,  # e5m2
) -> None:
    most: tl.constexpr = 57344.0 if WIDE else 448.0
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    left = units * UNIT - begin
    at = tl.arange(0, BLOCK)
    values = tl.load(x + begin + at, mask=at < left, other=0.0).to(tl.float32)
    amax = tl.max(tl.load(parts + tl.arange(0, PARTS))).to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(most, amax)
    scale = tl.where((amax == 0.0) | (amax == float("inf")), 1.0, scale)
    # Of magnitudes so small that the quotient overflows.
    scale = tl.where(scale == float("inf"), 3.4028234663852886e38, scale)
    tl.store(inverse, tl.math.div_rn(1.0, scale), mask=begin == 0)
    values *= scale
    if WIDE:
        made = values.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        made = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    places = code_columns(BLOCK)
    tl.store(codes + begin + places, made, mask=places < left)


_cast = WarmKernel(_cast_kernel)


def launch_cast(
    x: torch.Tensor,
    largest: Largest,
    codes: torch.Tensor,
    inverse: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Casts contiguous x, a multiple of `UNIT` elements, and writes the inverse of its scale.

    `scale = most / amax`, where `most` is the dtype's largest value, and 1 where amax is 0 or
    infinite. A NaN counts for nothing in amax, and gets a NaN's code.

    Args:
        codes: uint8, as x.
        inverse: fp32 `[1]`.
        dtype: `float8_e4m3fn` or `float8_e5m2`.
    """
    count = x.numel()
    _cast.launch(
        max(1, -(-count // _BLOCK)),
        (x, largest.parts, codes, inverse),
        (count // UNIT,),
        (UNIT, PARTS, _BLOCK, dtype == torch.float8_e5m2),
        num_warps=_WARPS,
    )
