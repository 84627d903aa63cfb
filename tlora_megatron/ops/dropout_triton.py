"""The dropout mask of `ops.dropout` for Triton kernels, equal to it bit for bit.

One word decides on two neighbouring columns. Triton has no way to say "the other column of this
thread's pair", so on a GPU a few lines of PTX mask both halves of a register that holds two 16-bit
values; the interpreter, and a dtype of 32 bits, compute every column's. Scaling by `1 / (1 - p)` is
left to the caller, who does it in fp32 on a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlora_megatron.ops import dropout

_SEED_STEP = tl.constexpr(dropout.SEED_STEP)
_SEED_FACTOR = tl.constexpr(dropout.SEED_FACTOR)
_FACTOR_0, _FACTOR_1, _FACTOR_2, _FACTOR_3 = (tl.constexpr(f) for f in dropout.PAIR_FACTORS)
_LOWEST = tl.constexpr(dropout.LOWEST)
_MOST_DROPPED = tl.constexpr(dropout.MOST_DROPPED)

_MASK_PAIR = tl.constexpr(
    """
{
    .reg .pred low, high;
    .reg .b32 h, t, lo, hi;
    xor.b32 h, $2, $4;
    mul.lo.u32 h, h, 0x85EBCA6B;
    shr.u32 t, h, 16;
    xor.b32 h, h, t;
    mul.lo.u32 h, h, $6;
    sub.u32 t, 0xFC00, h;
    and.b32 t, t, 0xFFFF;
    setp.ge.u32 low, t, $8;
    shr.u32 t, h, 16;
    sub.u32 t, 0xFC00, t;
    and.b32 t, t, 0xFFFF;
    setp.ge.u32 high, t, $8;
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
    """Places below this are dropped, uint32: `ops.dropout.dropped_places`."""
    return tl.minimum((p * 65536.0 + 0.5).to(tl.uint32), _MOST_DROPPED)


@triton.jit
def seed_steps(columns: tl.tensor) -> tl.tensor:
    """Returns the number that a column adds to its row's hash, uint32."""
    return ((columns >> 5) * 4 + ((columns >> 1) & 3)).to(tl.uint32) * _SEED_STEP


@triton.jit
def pair_factors(columns: tl.tensor) -> tl.tensor:
    """Returns the factor of a column's seed, uint32."""
    i = (columns >> 3) & 3
    low = tl.where(i == 0, _FACTOR_0, _FACTOR_1)
    return tl.where(i < 2, low, tl.where(i == 2, _FACTOR_2, _FACTOR_3)).to(tl.uint32)


@triton.jit
def keep_mask(hash_M: tl.tensor, columns: tl.tensor, below: tl.tensor) -> tl.tensor:
    """Returns True for kept elements; `columns` and `below` broadcast against `hash_M`."""
    seeds = (hash_M ^ seed_steps(columns)) * _SEED_FACTOR
    seeds = seeds ^ (seeds >> 16)
    bits = (seeds * pair_factors(columns)) >> ((columns & 1) << 4).to(tl.uint32)
    return ((_LOWEST - bits) & 0xFFFF) >= below


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
        hashes, steps = tl.broadcast(hash_M, seed_steps(columns))
        return tl.inline_asm_elementwise(
            _MASK_PAIR,
            "=r,r,r,r,r,r,r,r,r,r",
            [x, hashes, steps, pair_factors(columns), below],
            dtype=x.dtype,
            is_pure=True,
            pack=2,
        )
    return tl.where(keep_mask(hash_M, columns, below), x, 0.0)
