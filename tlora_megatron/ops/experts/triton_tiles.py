"""The work of kernels at routed experts, laid out on the device, and the rank rows that they read.

A pair is an expert and a slot, the null slot included; its rows are one run. A tile is a block of
rows of one pair, counted from the pair's first row, so that a job's rounding is its own. The host
knows no count: it starts as many programs as there can be tiles, and those left over end at once.

Shapes: L experts, S slots and the null slot, P = L (S + 1) pairs, Q rows.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns
from tlora_megatron.ops.experts.factors import RankTables
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.warm_kernel import WarmKernel

TILE_ROWS = 64
"""Rows of a tile: few enough for the short runs of many experts and adapters."""
TILE_FIELDS = 4


class PairTiles(NamedTuple):
    """A micro-batch's tiles at one layer."""

    begins: Tensor
    """int32 `[P + 1]`: the first row of each pair, and the end of the last."""
    tiles: Tensor
    """int32 `[bound, 4]`: expert, slot, first row and end; the expert of one left over is -1."""


@triton.jit(do_not_specialize=["pairs"])
def _scan_kernel(
    counts: tl.tensor,  # int64 [P]
    begins: tl.tensor,  # int32 [P + 1]
    tile_begins: tl.tensor,  # int32 [P + 1]
    pairs: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, tile = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        count = tl.load(counts + pair, mask=pair < pairs, other=0).to(tl.int32)
        tiles = (count + ROWS - 1) // ROWS
        tl.store(begins + pair, row + tl.cumsum(count, 0) - count, mask=pair < pairs)
        tl.store(tile_begins + pair, tile + tl.cumsum(tiles, 0) - tiles, mask=pair < pairs)
        row += tl.sum(count, 0)
        tile += tl.sum(tiles, 0)
    tl.store(begins + pairs, row)
    tl.store(tile_begins + pairs, tile)


@triton.jit(do_not_specialize=["pairs", "columns", "bound"])
def _tiles_kernel(
    begins: tl.tensor,
    tile_begins: tl.tensor,
    tiles: tl.tensor,
    pairs: tl.tensor,
    columns: tl.tensor,
    bound: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tile < bound
    # The last pair whose first tile is this one or one before: pairs without rows have none.
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + pairs
    left = pairs
    while left > 0:
        middle = (low + high) // 2
        goes_on = low + 1 < high
        at = tl.load(tile_begins + middle, mask=inside & goes_on, other=0)
        low = tl.where(goes_on & (at <= tile), middle, low)
        high = tl.where(goes_on & (at > tile), middle, high)
        left = left // 2
    pair = low
    begin = tl.load(begins + pair, mask=inside, other=0)
    end = tl.load(begins + pair + 1, mask=inside, other=0)
    row = begin + (tile - tl.load(tile_begins + pair, mask=inside, other=0)) * ROWS
    live = tile < tl.load(tile_begins + pairs)
    at_tile = tiles + tile * FIELDS
    tl.store(at_tile, tl.where(live, pair // columns, -1), mask=inside)
    tl.store(at_tile + 1, pair % columns, mask=inside)
    tl.store(at_tile + 2, row, mask=inside)
    tl.store(at_tile + 3, tl.minimum(row + ROWS, end), mask=inside)


_scan = WarmKernel(_scan_kernel)
_tiles = WarmKernel(_tiles_kernel)


def pair_tiles(counts_LS: Tensor, num_rows: int) -> PairTiles:
    """Lays out the tiles of a micro-batch; nothing waits for the device.

    Args:
        counts_LS: int64 `[L, S + 1]`: rows of each pair; they sum to Q.
        num_rows: Q.
    """
    experts, columns = counts_LS.shape
    pairs = experts * columns
    bound = num_rows // TILE_ROWS + min(pairs, num_rows)
    begins, tile_begins = (counts_LS.new_empty(pairs + 1, dtype=torch.int32) for _ in range(2))
    tiles = begins.new_empty(bound, TILE_FIELDS)
    block = min(1024, triton.next_power_of_2(pairs))
    tensors = (counts_LS.contiguous(), begins, tile_begins)
    _scan.launch(1, tensors, (pairs,), (TILE_ROWS, block), num_warps=4)
    if bound:
        _tiles.launch(
            triton.cdiv(bound, 128),
            (begins, tile_begins, tiles),
            (pairs, columns, bound),
            (TILE_ROWS, 128, TILE_FIELDS),
            num_warps=4,
        )
    return PairTiles(begins, tiles)


def tiles_of(runs: ExpertRuns, num_rows: int, device: torch.device) -> PairTiles:
    """Returns the tiles of a layer's call, made once."""
    if runs not in _known:
        counts_LS = runs.counts_LS
        counts_LS = counts_LS if counts_LS.is_cuda else to_device(counts_LS, device)
        _known[runs] = pair_tiles(counts_LS, num_rows)
    return _known[runs]


_known: WeakKeyDictionary[ExpertRuns, PairTiles] = WeakKeyDictionary()


def ranks_at_once(tables: RankTables, most: int) -> int:
    """Returns the rank rows that a program takes at once: the widest slot's, up to a number."""
    return min(most, triton.next_power_of_2(max(tables.width, 16)))


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
    first: tl.tensor, begin: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr, FITS: tl.constexpr
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
