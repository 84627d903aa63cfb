"""Rank rows of a pair's factors, by the addresses of `ops.experts.rank_tables`; for kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rank_places(
    table: tl.tensor,  # int64 [4, S, W]
    slots: tl.tensor,
    width: tl.tensor,
    slot: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Addresses of column 0 of rank rows `first:first + CHUNK`, and the columns that they have.

    Rows that a slot lacks have no columns.
    """
    rank = first + tl.arange(0, CHUNK)
    at = table + slot * width + rank
    plane = slots * width
    held = rank < width
    address = tl.load(at, mask=held, other=0)
    address += expert.to(tl.int64) * tl.load(at + plane, mask=held, other=0)
    begin = tl.load(at + 2 * plane, mask=held, other=0).to(tl.int32)
    end = tl.load(at + 3 * plane, mask=held, other=0).to(tl.int32)
    return address, begin, end


@triton.jit
def factor_pointers(
    address: tl.tensor, columns: tl.tensor, element: tl.constexpr, ALIGNED: tl.constexpr
) -> tl.tensor:
    """Pointers `[CHUNK, BLOCK]` to elements of rank rows.

    Args:
        columns: `[BLOCK]`.
        element: the factors' dtype.
    """
    pointers = address.to(tl.pointer_type(element))
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers[:, None] + columns[None, :]


@triton.jit
def in_columns(
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    BLOCK: tl.constexpr,
    FITS: tl.constexpr,
) -> tl.tensor:
    """Which elements there are of the columns `first:first + BLOCK` of rank rows.

    Args:
        FITS: rows begin and end between blocks, so that copies need not look at columns.
    """
    if FITS:
        held = ((first >= begin) & (first < end))[:, None]
    else:
        columns = (first + tl.arange(0, BLOCK))[None, :]
        held = (columns >= begin[:, None]) & (columns < end[:, None])
    return held


@triton.jit
def is_chunk_of(own_width: tl.tensor, CHUNK: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """Whether a slot of so many rank rows is computed so many at a time: the least power of two
    from 16 on that holds them, and MOST where none does."""
    is_least = (own_width > (CHUNK // 2 if CHUNK > 16 else 0)) & (own_width <= CHUNK)
    return is_least | ((own_width > CHUNK) & (CHUNK == MOST))
