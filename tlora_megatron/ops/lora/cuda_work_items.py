"""Work items of rank_rows.cu and rank_sums.cu: pure functions of segments and ranks.

An item is the work of one cluster (rows) or one block (sums), int32 in the order in which the
kernel's `Item` reads it. At most 128 rank rows belong to an item; a slot with more takes several.
One list holds the sums of both inputs: x, whose sums are dA, and dy, whose sums are dB.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlora_megatron.ops.host_copy import Array
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.lora.tiling import (
    RANK_CHUNK,
    ROW_TILE,
    Borders,
    ItemList,
    PlanTensors,
    item_array,
    spread,
)

BLOCK_ROWS = 128
"""Rows of an item of rows."""
ROW_PARTS = 4
"""Blocks that share an item of rows; a constant, since it decides the order of sums. Of 2, 4 and 8
the fastest over the linears of an 8B model on an H200, for 4,096 to 16,384 rows."""
ITEM_CHUNKS = 8
"""Rank chunks of an item: `kMaxChunks` of rank_ring.cuh."""
DOWN, UP = 0, 1
"""Kinds of items: dA = dS^T drop(x), and dB = dy^T s."""
BLOCK_FEATURES = 128
"""Features of an item of sums: two warpgroups of 64."""
_STEP_ROWS = 64
"""Rows that a block takes at once."""
_KERNEL_WIDTH = np.array([0, 16, 32, 64, 64, 128, 128, 128, 128])
"""Rank columns that the kernel computes for so many chunks."""
_WORKSPACE_PER_WIDTH = 2
"""Rank columns whose sums over 128 features fill a unit of the workspace, 256 fp32."""
_BEGIN, _END, _COUNT, _PARTS, _WORKSPACE, _COUNTER, _KIND = 0, 1, 6, 11, 12, 13, 14


def row_items(
    plan: PlanTensors, *, per_target: bool, window: tuple[int, int] | None = None
) -> ItemList:
    """Returns items, those with most rows of their segment first, then in order of rows.

    Blocks start in order: what is left for multiprocessors that have a block already is short.

    Args:
        per_target: dS reads each target's own columns and arena; s reads the same x for all targets
            of a slot, whose rows are neighbours in the arena of `lora_a`.
        window: of the rows that count; what is written must be 0 in the others already.
    """
    first, last = window or (0, plan.num_rows)
    by_target = plan.slot_chunks[plan.pair_slot]
    counts = by_target if per_target else by_target.sum(axis=1, keepdims=True)
    part, k = spread(-(-counts // ITEM_CHUNKS).ravel())
    pair, target = np.divmod(part, max(counts.shape[1], 1))
    before = (np.cumsum(counts, axis=1) - counts).ravel()[part] + ITEM_CHUNKS * k
    begins = plan.b_begin if per_target else plan.a_begin
    arena = begins[plan.pair_slot[pair], target]
    fields = [
        np.maximum(plan.pair_begin[pair], first),
        np.minimum(plan.pair_end[pair], last),
        target,
        plan.pair_slot[pair],
        np.minimum(counts.ravel()[part] - ITEM_CHUNKS * k, ITEM_CHUNKS),
        arena + ITEM_CHUNKS * RANK_CHUNK * k,
        plan.pair_first[pair] + before,
        before * RANK_CHUNK,
    ]
    halves = ROW_TILE // BLOCK_ROWS
    begin, end, target, slot, count, arena_row, chunk, column = (
        np.repeat(f, halves) for f in fields
    )
    tile_column = np.tile(np.arange(halves) * BLOCK_ROWS, len(pair))
    row = np.repeat(plan.pair_tile[pair] * ROW_TILE, halves) + tile_column
    items = item_array(
        (row, begin, end, tile_column, target, slot, count, arena_row, chunk, column), len(row)
    )
    owned = np.minimum(end, row + BLOCK_ROWS) - np.maximum(begin, row)
    reads = np.where(owned > 0, owned + count * RANK_CHUNK, 0)
    order = np.lexsort((row, -reads))
    if window is not None:
        order = order[owned[order] > 0]
    return ItemList(items=items[order], workspace=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SumInput:
    """A wide input, `[rows of the window, in_columns]`, and how its sums are divided."""

    kind: int
    columns: tuple[OutputColumns, ...]
    """A target: its columns of the input; empty = all columns serve all targets (dA)."""
    in_columns: int
    rows_per_run: int
    window: tuple[int, int]
    """Rows that count."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Features of each target's gradient."""
        return tuple(c.size for c in self.columns) or (self.in_columns,)


def sum_items(plan: PlanTensors, inputs: Sequence[SumInput]) -> ItemList:
    """Returns the items of all inputs, those that move most bytes first: blocks end together.

    Of equal ones those of dy come first, which need not wait for dS, and of them those of later
    rows, which the cache still holds from the pass before.
    """
    lists, borders, workspace, counters = [], [], 0, 0
    for each in inputs:
        items, found, used, counted = _items_of(plan, each)
        shared = items[:, _PARTS] > 1
        items[shared, _WORKSPACE] += workspace
        items[shared, _COUNTER] += counters
        lists.append(items)
        borders.append(found)
        workspace, counters = workspace + used, counters + counted
    items = np.concatenate(lists)
    begin, up = items[:, _BEGIN], items[:, _KIND] == UP
    order = np.lexsort((np.where(up, -begin, begin), ~up, -moved_bytes(items)))
    return ItemList(items=items[order], workspace=workspace, borders=_border_table(borders))


def moved_bytes(items: Array) -> Array:
    """Bytes that each item reads and writes."""
    count = items[:, _COUNT]
    panels = 2 + np.where(count > ITEM_CHUNKS // 2, 2, 1)
    steps = -(-(items[:, _END] - items[:, _BEGIN]) // _STEP_ROWS)
    sums = np.where(items[:, _PARTS] > 1, _KERNEL_WIDTH[count], count * RANK_CHUNK)
    return steps * panels * _STEP_ROWS * 128 + 2 * sums * BLOCK_FEATURES * 4


def _border_table(borders: Sequence[Borders]) -> Array:
    """Returns where each counter's borders begin and end in this table, and all borders behind."""
    if not any(len(found.parts) for found in borders):
        return np.zeros(0, dtype=np.int64)
    parts = np.concatenate([found.parts for found in borders])
    count = np.concatenate([found.counts for found in borders])
    before = np.cumsum([0, *(len(found.parts) for found in borders)])
    place = np.concatenate([f.places + b for f, b in zip(borders, before, strict=False)])
    begin = 2 * len(count) + place
    return np.concatenate([np.stack([begin, begin + count], axis=1).ravel(), parts])


def _items_of(plan: PlanTensors, source: SumInput) -> tuple[Array, Borders, int, int]:
    """Returns an input's items, each counter's borders, the units of workspace and the counters."""
    widths: Array = np.array(source.widths, dtype=np.int64)
    chunks, arena_rows = plan.slot_chunks, plan.a_begin[:, : len(widths)]
    if len(widths) != chunks.shape[1]:  # all targets as one
        chunks = chunks.sum(axis=1, keepdims=True)
    blocks = -(-widths // BLOCK_FEATURES)
    table, borders = plan.runs(source.rows_per_run, source.window)
    slot, begin, end, part, parts, _ = table.T
    # Of a slot and target: blocks of features, each in its passes.
    cells = (-(-chunks // ITEM_CHUNKS) * blocks)[slot]
    cell, within = spread(cells.ravel())
    run, target = np.divmod(cell, max(len(widths), 1))
    k, block = np.divmod(within, blocks[target])
    feature = block * BLOCK_FEATURES
    count = np.minimum(chunks[slot[run], target] - ITEM_CHUNKS * k, ITEM_CHUNKS)
    arena_row = arena_rows[slot[run], target] + ITEM_CHUNKS * RANK_CHUNK * k
    first, second = (_input_columns(source, target, feature + h) for h in (0, 64))
    workspace, counter, used, counted = _workspace(cells, table, run, target, within, count)
    fields = (
        begin[run], end[run], first, second, feature, widths[target], count,
        arena_row - arena_rows[slot[run], 0], arena_row, slot[run], part[run], parts[run],
        workspace, counter, source.kind,
    )  # fmt: skip
    counts, places = np.zeros((2, counted), dtype=np.int64)
    shared = parts[run] > 1
    counts[counter[shared]] = borders.counts[run[shared]]
    places[counter[shared]] = borders.places[run[shared]]
    return item_array(fields, len(run)), Borders(borders.parts, counts, places), used, counted


def _workspace(
    cells: Array, table: Array, run: Array, target: Array, within: Array, count: Array
) -> tuple[Array, Array, int, int]:
    """Returns each item's place in the workspace and counter, and the sizes of both."""
    part, parts = table[:, 3], table[:, 4]
    # The first of a segment's several runs numbers its blocks; the others find theirs by it.
    numbered = np.where((part == 0) & (parts > 1), cells.sum(axis=1), 0)
    first_run = np.arange(len(table)) - part
    first_block = (np.cumsum(numbered) - numbered)[first_run]
    before = np.cumsum(cells, axis=1) - cells
    number = first_block[run] + before[run, target] + within
    number = np.where(parts[run] > 1, number, 0)
    first = (part[run] == 0) & (parts[run] > 1)
    counted = int(numbered.sum())
    size = np.zeros(counted + 1, dtype=np.int64)
    units = _KERNEL_WIDTH[count] // _WORKSPACE_PER_WIDTH * parts[run]
    size[number[first]] = units[first]
    return (np.cumsum(size) - size)[number], number, int(size.sum()), counted


def _input_columns(source: SumInput, target: Array, feature: Array) -> Array:
    """Returns the input's column of a feature; one beyond the last if there is none: zeros."""
    if not source.columns:
        return np.minimum(feature, source.in_columns)
    found = np.full(len(feature), source.in_columns, dtype=np.int64)
    for p, c in enumerate(source.columns):
        mine = (target == p) & (feature < c.size)
        group, inside = np.divmod(feature[mine], c.width)
        found[mine] = group * c.stride + c.begin + inside
    return found


@functools.cache
def rows_per_run(row_budget: int, features: int, blocks: int) -> int:
    """Returns the rows of a run, so many that one adapter's runs keep all multiprocessors busy.

    Shorter ones leave more partial sums, longer ones idle multiprocessors (H200, 2048 and 8192
    rows of 4096 features: the best of 256 to 2048). It depends on sizes alone, never on segments,
    as the order of a job's sums does.

    Args:
        row_budget: `RowGroups.row_budget`.
    """
    wanted = row_budget * -(-features // BLOCK_FEATURES) / blocks
    return min(4096, max(256, 2 ** round(np.log2(max(wanted, 1)))))


@dataclass(frozen=True, eq=False)
class SumSizes:
    """The sizes of a linear that decide the work of rank_sums.cu, besides a plan.

    There is one object for equal sizes: a work list is found by its address, whichever of the
    model's linears asks.
    """

    columns: tuple[OutputColumns, ...]
    in_columns: int
    out_columns: int


sum_sizes = functools.cache(SumSizes)


def sum_inputs(
    sizes: SumSizes,
    row_budget: int,
    num_rows: int,
    window: tuple[int, int],
    blocks: int,
    kinds: tuple[int, ...],
) -> tuple[SumInput, ...]:
    """Returns x over a window of rows and dy over all rows, as the sums of dA and dB read them."""
    down = SumInput(
        kind=DOWN,
        columns=(),
        in_columns=sizes.in_columns,
        rows_per_run=rows_per_run(row_budget, sizes.in_columns, blocks),
        window=window,
    )
    up = SumInput(
        kind=UP,
        columns=sizes.columns,
        in_columns=sizes.out_columns,
        # Of all outputs: which of them have adapters follows from a job's neighbours.
        rows_per_run=rows_per_run(row_budget, sizes.out_columns, blocks),
        window=(0, num_rows),
    )
    return tuple(each for each in (down, up) if each.kind in kinds)
