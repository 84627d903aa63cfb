"""The dropout mask of `ops.dropout` inside Triton kernels: equal to it bit for bit.

One hash serves two neighbouring columns. Triton has no way to say "the other column of this
thread's pair", so on a GPU a few lines of PTX mask both halves of a register that holds two 16-bit
values; the interpreter, and a dtype of 32 bits, hash every column. Scaling by `1 / (1 - p)` is left
to the caller, who does it in fp32 on a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

_COLUMN_STEP = tl.constexpr(0x9E3779B9)  # `ops.dropout._COLUMN_STEP` as an unsigned number

_MASK_PAIR = tl.constexpr(
    """
{
    .reg .pred low, high;
    .reg .b32 h, t, lo, hi;
    xor.b32 h, $2, $4;
    shr.u32 t, h, 16;
    xor.b32 h, h, t;
    mul.lo.u32 h, h, 0x85EBCA6B;
    shr.u32 t, h, 13;
    xor.b32 h, h, t;
    mul.lo.u32 h, h, 0xC2B2AE35;
    shr.u32 t, h, 16;
    xor.b32 h, h, t;
    and.b32 t, h, 0xFFFF;
    setp.ge.u32 low, t, $6;
    shr.u32 t, h, 16;
    setp.ge.u32 high, t, $6;
    selp.b32 lo, 0x0000FFFF, 0, low;
    selp.b32 hi, 0xFFFF0000, 0, high;
    or.b32 lo, lo, hi;
    and.b32 $0, $1, lo;
}
"""
)


@triton.jit
def mix32(h: tl.tensor) -> tl.tensor:
    """`ops.dropout.mix32` of uint32."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def row_hash(row_keys: tl.tensor, rows: tl.tensor, live: tl.tensor, key: tl.tensor) -> tl.tensor:
    """The part of the hash that a row's columns share, uint32; `key` is the linear's."""
    keys = tl.load(row_keys + rows, mask=live, other=0)
    return mix32((keys ^ key).to(tl.uint32, bitcast=True))


@triton.jit
def dropped_below(p: tl.tensor) -> tl.tensor:
    """16-bit hashes below this are dropped, uint32."""
    return (p * 65536.0 + 0.5).to(tl.uint32)


@triton.jit
def keep_mask(hash_M: tl.tensor, columns: tl.tensor, below: tl.tensor) -> tl.tensor:
    """Whether each element is kept; `columns` broadcasts against `hash_M`, as does `below`."""
    steps = (columns >> 1).to(tl.uint32) * _COLUMN_STEP
    hashes = mix32(hash_M ^ steps)
    bits = (hashes >> ((columns & 1) << 4).to(tl.uint32)) & 0xFFFF
    return bits >= below


@triton.jit
def drop_zero(
    x: tl.tensor, hash_M: tl.tensor, columns: tl.tensor, below: tl.tensor, PAIRS: tl.constexpr
) -> tl.tensor:
    """x with dropped elements 0 and the others as they are.

    Args:
        x: `[M, N]`.
        hash_M: `row_hash` as `[M, 1]`.
        columns: global columns as `[1, N]`, consecutive, from an even one on.
        below: `dropped_below` of the rows' probability, a scalar.
        PAIRS: x has 16 bits and a thread holds whole pairs of columns: true on GPUs, where every
            layout gives a thread at least two neighbours of the fastest dimension.
    """
    if PAIRS:
        steps = (columns >> 1).to(tl.uint32) * _COLUMN_STEP
        hashes, steps = tl.broadcast(hash_M, steps)
        return tl.inline_asm_elementwise(
            _MASK_PAIR,
            "=r,r,r,r,r,r,r,r",
            [x, hashes, steps, below],
            dtype=x.dtype,
            is_pure=True,
            pack=2,
        )
    return tl.where(keep_mask(hash_M, columns, below), x, 0.0)
