"""Adapters' products at a linear of the routed experts in a few launches, whatever their numbers.

M are the rank rows of a pair: of A or of B, which is stored as `[rank, out]`. One program computes
a tile's rows, for all rank rows or for a block of columns. Rounding of a row depends on nothing but
the row and its adapter.

Shapes: Q rows, K columns of the linear's side, W rank rows of the widest slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertFactors, ExpertOps, ExpertRuns, PlacedRows
from tlora_megatron.ops.experts.triton_sums import add_sums
from tlora_megatron.ops.experts.triton_tiles import (
    TILE_FIELDS,
    TILE_ROWS,
    PairTiles,
    RankRows,
    RankTables,
    factor_pointers,
    in_columns,
    is_chunk_of,
    rank_places,
    ranks_at_once,
    tables_of,
    tiles_of,
)
from tlora_megatron.ops.warm_kernel import WarmKernel

_DEPTH, _STAGES = 64, 4
"""Columns of x that one step of `down` reads, and steps under way."""
_COLUMNS = 128
"""Columns of y of a program of `up`."""
_DOWN_RANKS, _UP_RANKS = 128, 64
"""Rank rows that a program multiplies at once; wider slots take several rounds."""


@triton.jit
def _down_rows(
    tile: tl.tensor, x: tl.tensor, places: tl.tensor, table: tl.tensor, scaling: tl.tensor,
    positions: tl.tensor, s: tl.tensor, wide: tl.tensor, slots: tl.tensor, width: tl.tensor,
    wide_width: tl.tensor, own_width: tl.tensor, K: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    FITS: tl.constexpr, IEEE: tl.constexpr, WIDE: tl.constexpr, PLACED: tl.constexpr,
) -> None:  # fmt: skip
    expert, slot = tl.load(tile), tl.load(tile + 1)
    begin, end = tl.load(tile + 2), tl.load(tile + 3)
    local = tl.arange(0, ROWS)
    live = local < end - begin
    rows = (begin + local).to(tl.int64)
    at_x = rows
    if PLACED:
        at_x = tl.load(places + rows, mask=live, other=0)
    scale = tl.load(scaling + slot)
    width = tl.multiple_of(width, 16)
    filled = (own_width + 15) // 16 * 16
    for first in range(0, own_width, CHUNK):
        address, low, high = rank_places(table, slots, width, slot, expert, first, CHUNK)
        sums = tl.zeros([ROWS, CHUNK], dtype=tl.float32)
        for depth in tl.range(0, K, BLOCK, num_stages=STAGES):
            columns = depth + tl.arange(0, BLOCK)
            mask = live[:, None]
            if K % BLOCK != 0:
                mask = mask & (columns < K)[None, :]
            block = tl.load(x + at_x[:, None] * K + columns[None, :], mask=mask, other=0.0)
            at = factor_pointers(address, columns, x.dtype.element_ty, ALIGNED)
            held = in_columns(depth, low, high, BLOCK, FITS)
            ranks = tl.load(at, mask=held, other=0.0)
            sums = tl.dot(block, tl.trans(ranks), sums, input_precision="ieee" if IEEE else "tf32")
        rank = first + tl.arange(0, CHUNK)
        found = (sums * scale).to(s.dtype.element_ty)
        # Beyond its rank rows a slot has zeros up to a whole chunk.
        held = live[:, None] & (rank < filled)[None, :]
        tl.store(s + rows[:, None] * width + rank[None, :], found, mask=held)
        if WIDE:
            wide_width = tl.multiple_of(wide_width, 8)
            own = live[:, None] & (rank < (own_width + 7) // 8 * 8)[None, :]
            place = tl.multiple_of(tl.load(positions + slot), 8) + rank
            tl.store(wide + rows[:, None] * wide_width + place[None, :], found, mask=own)


@triton.jit(do_not_specialize=["slots", "width", "wide_width"])
def _down_kernel(
    tiles: tl.tensor,
    x: tl.tensor,  # [Q, K], or [T, K] where PLACED
    places: tl.tensor,  # int64 [Q], or x
    table: tl.tensor,
    widths: tl.tensor,
    scaling: tl.tensor,
    positions: tl.tensor,
    s: tl.tensor,  # [Q, W]
    wide: tl.tensor,  # [Q, R], zeros, or s
    slots: tl.tensor,
    width: tl.tensor,
    wide_width: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FITS: tl.constexpr,
    IEEE: tl.constexpr,
    WIDE: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    tile = tiles + tl.program_id(0) * FIELDS
    expert, slot = tl.load(tile), tl.load(tile + 1)
    if (expert >= 0) & (slot < slots):
        own_width = tl.load(widths + slot)
        # An adapter of a small rank does the work of a small one, whoever stands beside it.
        for EXPONENT in tl.static_range(4, 8):
            if 2**EXPONENT <= MOST:  # noqa: SIM102 - chosen when it is compiled
                if is_chunk_of(own_width, 2**EXPONENT, MOST):
                    _down_rows(
                        tile, x, places, table, scaling, positions, s, wide, slots, width,
                        wide_width, own_width, K, ROWS, 2**EXPONENT, BLOCK, STAGES, ALIGNED, FITS,
                        IEEE, WIDE, PLACED,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "width"])
def _up_kernel(
    tiles: tl.tensor,
    s: tl.tensor,  # [Q, W]
    factor: tl.tensor,
    table: tl.tensor,
    widths: tl.tensor,
    y: tl.tensor,  # [Q, K]
    slots: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FITS: tl.constexpr,
    IEEE: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    tile = tiles + tl.program_id(0) // blocks * FIELDS
    expert = tl.load(tile)
    slot = tl.load(tile + 1)
    if (expert >= 0) & (slot < slots):
        own_width = tl.load(widths + slot)
        if own_width > 0:
            begin, end = tl.load(tile + 2), tl.load(tile + 3)
            local = tl.arange(0, ROWS)
            live = local < end - begin
            rows = (begin + local).to(tl.int64)
            columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
            mask = live[:, None] & (columns < K)[None, :]
            at_y = y + rows[:, None] * K + columns[None, :]
            sums = tl.load(at_y, mask=mask, other=0.0).to(tl.float32)
            width = tl.multiple_of(width, 16)
            filled = (own_width + 15) // 16 * 16
            for first in range(0, own_width, CHUNK):
                address, low, high = rank_places(table, slots, width, slot, expert, first, CHUNK)
                rank = first + tl.arange(0, CHUNK)
                held = live[:, None] & (rank < filled)[None, :]
                at_s = s + rows[:, None] * width + rank[None, :]
                ranks = tl.load(at_s, mask=held, other=0.0)
                at = factor_pointers(address, columns, factor.dtype.element_ty, ALIGNED)
                rank_rows = tl.load(
                    at,
                    mask=in_columns(tl.program_id(0) % blocks * BLOCK, low, high, BLOCK, FITS),
                    other=0.0,
                )
                sums = tl.dot(ranks, rank_rows, sums, input_precision="ieee" if IEEE else "tf32")
            tl.store(at_y, sums.to(y.dtype.element_ty), mask=mask)


_down = WarmKernel(_down_kernel)
_up = WarmKernel(_up_kernel)


def down(
    x: PlacedRows,
    rows: RankRows,
    tables: RankTables,
    tiles: PairTiles,
    wide_QR: Tensor | None = None,
    out_QW: Tensor | None = None,
) -> Tensor:
    """Returns `scaling x M^T` `[Q, W]` in the dtype of x.

    Of a row's columns its slot's are defined, and zeros behind them up to a multiple of 16.

    Args:
        wide_QR: zeros; gets the same at the rank columns of the arenas.
        out_QW: what is written and returned; None = a new tensor.
    """
    values_TK, rows_Q = x
    num_rows = len(values_TK if rows_Q is None else rows_Q)
    s_QW = values_TK.new_empty(num_rows, tables.width) if out_QW is None else out_QW
    if not len(tiles.tiles):
        return s_QW
    wide = s_QW if wide_QR is None else wide_QR
    places = values_TK if rows_Q is None else rows_Q
    tensors = (tiles.tiles, values_TK, places, rows.places_4SW, tables.widths_S, tables.scaling_S)
    _down.launch(
        len(tiles.tiles),
        (*tensors, tables.positions, s_QW, wide),
        (tables.slots, tables.width, wide.shape[1]),
        (
            values_TK.shape[1],
            TILE_ROWS,
            ranks_at_once(tables, _DOWN_RANKS),
            _DEPTH,
            _STAGES,
            TILE_FIELDS,
            int(rows.aligned),
            int(rows.span % _DEPTH == 0),
            int(values_TK.dtype == torch.float32),
            int(wide_QR is not None),
            int(rows_Q is not None),
        ),
        num_warps=4,
    )
    return s_QW


def up(y_QK: Tensor, s_QW: Tensor, rows: RankRows, tables: RankTables, tiles: PairTiles) -> None:
    """Adds `s M` to y, rounded once."""
    if not len(tiles.tiles):
        return
    _up.launch(
        len(tiles.tiles) * triton.cdiv(y_QK.shape[1], _COLUMNS),
        (tiles.tiles, s_QW, s_QW, rows.places_4SW, tables.widths_S, y_QK),
        (tables.slots, tables.width),
        (
            y_QK.shape[1],
            TILE_ROWS,
            ranks_at_once(tables, _UP_RANKS),
            _COLUMNS,
            TILE_FIELDS,
            int(rows.aligned),
            int(rows.span % _COLUMNS == 0),
            int(y_QK.dtype == torch.float32),
        ),
        num_warps=4,
    )


class TritonExpertOps(ExpertOps):
    """Computes what `TorchExpertOps` defines; s and dS are `[Q, W]`. Never waits for the device."""

    def forward(
        self, x: PlacedRows, y_QN: Tensor, runs: ExpertRuns, factors: ExpertFactors
    ) -> Sequence[Tensor]:
        tables, tiles = tables_of(factors), tiles_of(runs, len(y_QN), y_QN.device)
        s_QW = down(x, tables.lora_a, tables, tiles)
        up(y_QN, s_QW, tables.lora_b, tables, tiles)
        return (s_QW,)

    def input_backward(
        self,
        dy: PlacedRows,
        dx_QK: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        factors: ExpertFactors,
    ) -> Sequence[Tensor]:
        (s_QW,) = saved
        tables, tiles = tables_of(factors), tiles_of(runs, len(dx_QK), dx_QK.device)
        ds_QW = down(dy, tables.lora_b, tables, tiles)
        up(dx_QK, ds_QW, tables.lora_a, tables, tiles)
        add_sums(tables.grad_b, s_QW, dy, tables, tiles)
        return (ds_QW,)

    def input_sums(
        self, ds: Sequence[Tensor], x: PlacedRows, runs: ExpertRuns, factors: ExpertFactors
    ) -> None:
        (ds_QW,) = ds
        tables, tiles = tables_of(factors), tiles_of(runs, len(ds_QW), ds_QW.device)
        add_sums(tables.grad_a, ds_QW, x, tables, tiles)
