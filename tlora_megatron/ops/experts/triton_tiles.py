"""The work of kernels at routed experts, laid out on the device, and the rank rows that they read.

A pair is an expert and a slot, the null slot included; its rows are one run. A tile is a block of
rows of one pair, counted from the pair's first row, so that a job's rounding is its own. The host
knows no count: it starts as many programs as there can be tiles, and those left over end at once.

A slot's rank rows at a linear are those of its targets one after another: on `linear_fc1` the rows
of gate's A, then those of up's. Each row is found by the address that it has at expert 0 and by how
far apart experts lie, so factors stay where their slabs and copies hold them.

Shapes: L experts, or 1 for what they share, S slots and the null slot, P = L (S + 1) pairs, Q rows,
W rank rows of the widest slot, a multiple of `CHUNK`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.experts.branch import CHUNK, ExpertFactors, ExpertRuns, ExpertTarget
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
    begins: tl.tensor, tile_begins: tl.tensor, tiles: tl.tensor, pairs: tl.tensor,
    columns: tl.tensor, bound: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:  # fmt: skip
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
    if runs not in _tiles_known:
        counts_LS = runs.counts_LS
        counts_LS = counts_LS if counts_LS.is_cuda else to_device(counts_LS, device)
        _tiles_known[runs] = pair_tiles(counts_LS, num_rows)
    return _tiles_known[runs]


_tiles_known: WeakKeyDictionary[ExpertRuns, PairTiles] = WeakKeyDictionary()


class RankRun(NamedTuple):
    """Rank rows of a slot that have the same columns: those of one target."""

    begin: int
    end: int
    columns: range


class RankRows(NamedTuple):
    """One factor of all adapters, row by row of the rank."""

    places_4SW: Tensor
    """int64: address at expert 0, 0 where there is no row; bytes from expert to expert; first
    column of the linear that the row has, and the one behind its last."""
    aligned: bool
    """True if all addresses are multiples of 16."""
    span: int
    """What the first columns of all rows and their ends are multiples of."""
    runs_S: tuple[tuple[RankRun, ...], ...]
    """The same on the host, slot by slot."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RankTables:
    """All adapters at one linear of the routed experts."""

    slots: int
    width: int
    """W; 0 where no adapter is."""
    widths_S: Tensor
    """int32: rank rows of each slot."""
    lora_a: RankRows
    lora_b: RankRows
    grad_a: RankRows
    grad_b: RankRows
    scaling_S: Tensor
    """fp32."""
    positions: Tensor
    """int32: the slots' rank columns in the arenas (`ExpertArenas.positions`), if there are any."""


class Placed(NamedTuple):
    """A factor's place among a slot's rank rows and a linear's columns."""

    row: int
    column: int
    factor: Tensor
    """`[L, rank, columns]`."""


def tables_of(factors: ExpertFactors) -> RankTables:
    """Returns the tables of a linear on the device of its factors, made once."""
    if factors not in _tables_known:
        _tables_known[factors] = _rank_tables(factors)
    return _tables_known[factors]


_tables_known: WeakKeyDictionary[ExpertFactors, RankTables] = WeakKeyDictionary()


def _rank_tables(factors: ExpertFactors) -> RankTables:
    ranks = [[target.lora_a.shape[1] for target in targets] for targets in factors.targets]
    widths = [sum(of_slot) for of_slot in ranks]
    width = -(-max(widths, default=0) // CHUNK) * CHUNK
    device = factors.scaling.device

    def rows(pick: Callable[[ExpertTarget], Tensor], *, out: bool) -> RankRows:
        slots = []
        for targets, of_slot in zip(factors.targets, ranks, strict=True):
            begins = itertools.accumulate(of_slot, initial=0)
            slots.append(
                [
                    Placed(row, target.columns.start if out else 0, pick(target))
                    for row, target in zip(begins, targets, strict=False)
                ]
            )
        return rank_rows(slots, width, device)

    widths_S = torch.tensor(widths, dtype=torch.int32, device=device)
    return RankTables(
        slots=len(widths),
        width=width,
        widths_S=widths_S,
        lora_a=rows(lambda target: target.lora_a, out=False),
        lora_b=rows(lambda target: target.lora_b, out=True),
        grad_a=rows(lambda target: target.grad_a, out=False),
        grad_b=rows(lambda target: target.grad_b, out=True),
        scaling_S=factors.scaling,
        positions=factors.arenas.positions,
    )


def rank_rows(slots: Sequence[Sequence[Placed]], width: int, device: torch.device) -> RankRows:
    """Builds the table of one factor of every slot, and copies it to a device."""
    places = torch.zeros(4, len(slots), width, dtype=torch.int64)
    runs: list[tuple[RankRun, ...]] = []
    for slot, of_slot in enumerate(slots):
        found = []
        for row, column, factor_LRN in of_slot:
            assert factor_LRN.stride(2) == 1, "a rank row lies in one piece"
            size, (_, rank, columns) = factor_LRN.element_size(), factor_LRN.shape
            steps = torch.arange(rank) * (factor_LRN.stride(1) * size)
            rows = slice(row, row + rank)
            # Of column 0 of the linear, so that a column is added as it is.
            places[0, slot, rows] = factor_LRN.data_ptr() - column * size + steps
            places[1, slot, rows] = factor_LRN.stride(0) * size
            places[2, slot, rows] = column
            places[3, slot, rows] = column + columns
            found.append(RankRun(row, row + rank, range(column, column + columns)))
        runs.append(tuple(found))
    aligned = not bool((places[:2] % 16).any())
    span = math.gcd(*places[2:].flatten().tolist())
    return RankRows(places.to(device), aligned, span, tuple(runs))


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
