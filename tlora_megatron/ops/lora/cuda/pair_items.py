"""Work items of rank_pair.cu, which makes dS and dB in one pass over dy: pure functions.

An item is a run of a segment's rows by a range of a target's columns, for at most 64 rank rows: a
slot with more takes several. Parts of dS, one a range, and parts of dB, one a run, meet in the
workspace, each with counters of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tlora_megatron.ops.lora.cuda.work_items import BLOCK_FEATURES, border_table
from tlora_megatron.ops.lora.plan_tensors import (
    Array,
    ItemBounds,
    ItemList,
    PlanTensors,
    item_array,
    spread,
)
from tlora_megatron.ops.lora.tiling import (
    RANK_CHUNK,
    ROW_TILE,
    Borders,
    portion_borders,
    row_runs,
    run_table,
)

PAIR_CHUNKS = 4
"""Rank chunks of an item: `kPairChunks` of rank_pair_copies.cuh."""
STEP_ROWS = 128
"""Rows of which parts of dS are counted together."""
_WARPS = 8
"""That multiply; each counts its rows of a step."""
_KERNEL_WIDTH = np.array([0, 16, 32, 64, 64])
"""Rank columns that the kernel computes for so many chunks."""
_UNITS_PER_WIDTH = 2
"""Rank columns of which 128 sums fill a unit of the workspace, 256 fp32."""
_MOST_SUMS = 128
"""Panels times rank columns of an item's dB: what fits into registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairFit:
    """How the kernel divides its work: it decides orders of sums, so sizes alone decide it."""

    most_panels: int
    """Panels of 128 columns in a range, of ranks up to 16; fewer with more ranks: 2, 4 or 8."""
    rows_per_run: int

    def panels(self, width: Array) -> Array:
        """Panels of a range for so many rank columns of the kernel."""
        return np.minimum(self.most_panels, _MOST_SUMS // width)


@functools.cache
def pair_fit(row_budget: int, columns: int, blocks: int) -> PairFit | None:
    """Returns how dS and dB are made in one pass over dy; None: by a kernel each.

    Args:
        row_budget: `RowGroups.row_budget`.
        columns: of dy.
        blocks: multiprocessors of the GPU.
    """
    del row_budget, columns, blocks
    return None  # until both ways have been measured beside each other


@functools.cache
def wide_fit(row_budget: int, columns: int, blocks: int, most_panels: int = 4) -> PairFit:
    """Returns a fit whose items keep all multiprocessors busy, whoever has the rows."""
    wanted = row_budget * columns / (blocks * most_panels * BLOCK_FEATURES)
    rows = 2 ** round(np.log2(max(wanted, 1)))
    return PairFit(most_panels=most_panels, rows_per_run=min(4096, max(256, rows)))


class _Cells(NamedTuple):
    """What all slots' items have in common: `[slots, targets]`, then cells of runs."""

    chunks: Array
    passes: Array
    widths: Array
    fit: PairFit

    def ranges(self, target: Array, count: Array) -> tuple[Array, Array]:
        """Columns of a range, and the ranges of a target, for so many chunks."""
        columns = BLOCK_FEATURES * self.fit.panels(_KERNEL_WIDTH[count])
        return columns, -(-self.widths[target] // columns)


def _cells(plan: PlanTensors, widths: Sequence[int], fit: PairFit) -> _Cells:
    chunks = plan.slot_chunks
    return _Cells(chunks, -(-chunks // PAIR_CHUNKS), np.array(widths, dtype=np.int64), fit)


def pair_items(plan: PlanTensors, widths: Sequence[int], fit: PairFit) -> ItemList:
    """Returns the items, those that move most bytes first.

    Args:
        widths: features of each target.
    """
    grid = _cells(plan, widths, fit)
    runs = row_runs(plan.ends, plan.layout, fit.rows_per_run, (0, plan.num_rows), plan.cuts)
    table = run_table(runs)
    slot, begin, end, part, parts, _ = table.T
    cell, k = spread(grid.passes[slot].ravel())
    run, target = np.divmod(cell, max(len(widths), 1))
    count = np.minimum(grid.chunks[slot[run], target] - PAIR_CHUNKS * k, PAIR_CHUNKS)
    columns, ranges = grid.ranges(target, count)
    steps = -(-(end - begin) // STEP_ROWS)[run]
    units = np.where(ranges > 1, steps * ranges * (_KERNEL_WIDTH[count] // _UNITS_PER_WIDTH), 0)
    counted = np.where(ranges > 1, steps * _WARPS, 0)
    of, number = spread(ranges)
    sums = _Sums.of(table, run[of], fit, _KERNEL_WIDTH[count[of]])
    places = _places(plan, table, run, target, k)
    place = number * columns[of]
    fields = (
        *(values[run[of]] for values in (begin, end)),
        target[of],
        place,
        grid.widths[target[of]],
        count[of],
        *(values[of] for values in (places.rank_column, places.factor_row, places.arena_row)),
        *(values[run[of]] for values in (slot, part, parts)),
        sums.workspace,
        sums.counter,
        sums.units + (np.cumsum(units) - units)[of],
        sums.counters + (np.cumsum(counted) - counted)[of],
        places.chunk[of],
        places.tile_chunks[of],
    )
    items = item_array(fields, len(of))
    panels = -(-np.minimum(columns[of], items[:, 4] - place) // BLOCK_FEATURES)
    moved = panels * (steps[of] * STEP_ROWS + 4 * RANK_CHUNK * count[of])  # in rows of a panel
    return ItemList(
        items=items[np.argsort(-moved, kind="stable")],
        workspace=sums.units + int(units.sum()),
        borders=border_table([sums.borders]),
        counters=sums.counters + int(counted.sum()),
    )


class _Places(NamedTuple):
    """Where cells' factors, gradients, s and dS lie."""

    rank_column: Array
    factor_row: Array
    arena_row: Array
    chunk: Array
    tile_chunks: Array


def _places(plan: PlanTensors, table: Array, run: Array, target: Array, k: Array) -> _Places:
    slot, begin = table[run, 0], table[run, 1]
    shape = (len(plan.layout.ranks), -1)
    a_begin, b_begin = (
        np.array(begins, dtype=np.int64).reshape(shape)
        for begins in (plan.layout.a_begin, plan.layout.b_begin)
    )
    further = PAIR_CHUNKS * RANK_CHUNK * k
    arena_row = a_begin[slot, target] + further
    rank_column = arena_row - a_begin[slot, 0]
    tile_chunks = plan.slot_chunks.sum(axis=1)[slot]
    # A slot's pairs follow each other tile by tile.
    pair = np.searchsorted(plan.pair_slot, slot)
    pair += begin // ROW_TILE - plan.pair_tile[pair]
    return _Places(
        rank_column=rank_column,
        factor_row=b_begin[slot, target] + further,
        arena_row=arena_row,
        chunk=plan.pair_first[pair] + rank_column // RANK_CHUNK,
        tile_chunks=tile_chunks,
    )


class _Sums(NamedTuple):
    """Places of the parts of dB: each item's, then how many there are in all."""

    workspace: Array
    counter: Array
    units: int
    counters: int
    borders: Borders

    @classmethod
    def of(cls, table: Array, run: Array, fit: PairFit, width: Array) -> _Sums:
        """Numbers the items of segments with several runs; `run` and `width` are the items'."""
        part, parts = table[:, 3], table[:, 4]
        borders = portion_borders(table)
        items = np.bincount(run, minlength=len(table))
        within = np.arange(len(run)) - (np.cumsum(items) - items)[run]
        # The first of a segment's several runs numbers its items; the others find theirs by it.
        numbered = np.where((part == 0) & (parts > 1), items, 0)
        first_run = np.arange(len(table)) - part
        number = (np.cumsum(numbered) - numbered)[first_run][run] + within
        shared = parts[run] > 1
        number = np.where(shared, number, 0)
        total = int(numbered.sum())
        size, counts, places = np.zeros((3, total), dtype=np.int64)
        units = fit.panels(width) * width // _UNITS_PER_WIDTH * parts[run]
        size[number[shared]] = units[shared]
        counts[number[shared]] = borders.counts[run[shared]]
        places[number[shared]] = borders.places[run[shared]]
        before = np.append(np.cumsum(size) - size, 0)
        workspace = np.where(shared, before[number], 0)
        found = Borders(borders.parts, counts, places)
        return cls(workspace, number, int(size.sum()), total, found)


def pair_bounds(plan: PlanTensors, widths: Sequence[int], fit: PairFit) -> ItemBounds:
    """The most items, workspace and counters of any micro-batch."""
    grid = _cells(plan, widths, fit)
    cell, k = spread(grid.passes.ravel())
    slot, target = np.divmod(cell, max(len(widths), 1))
    count = np.minimum(grid.chunks[slot, target] - PAIR_CHUNKS * k, PAIR_CHUNKS)
    _, ranges = grid.ranges(target, count)
    width = _KERNEL_WIDTH[count]

    def most(values: Array) -> int:
        return int(np.bincount(slot, values, minlength=1).max(initial=0))

    slots = min(len(plan.layout.ranks), plan.num_rows)
    runs = plan.num_rows // fit.rows_per_run + slots
    steps = plan.num_rows // STEP_ROWS + runs
    # Only segments of several runs keep parts of dB: two runs have more rows than one could.
    parts = min(runs, 2 * plan.num_rows // (fit.rows_per_run + 1) + 2)
    items = most(ranges)
    of_sums = most(ranges * fit.panels(width) * width // _UNITS_PER_WIDTH)
    of_rows = most(ranges * width // _UNITS_PER_WIDTH)
    return ItemBounds(
        items=runs * items,
        workspace=parts * of_sums + steps * of_rows,
        counters=runs * items + steps * _WARPS * most(np.ones(len(slot))),
    )
