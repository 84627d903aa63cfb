"""Work items of rank_sums.cu: pure functions of a micro-batch's segments and ranks.

An item is one block's work, int32 in the order in which the kernel reads it: its `Item`. At most
128 rank rows belong to an item; a slot with more takes several. One list holds the items of both
inputs: x, whose sums are dA, and dy, whose sums are dB.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.cuda.row_items import ITEM_CHUNKS
from tlora_megatron.ops.lora.plan_tensors import (
    Array,
    ItemBounds,
    ItemList,
    PlanTensors,
    item_array,
    spread,
)
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, row_runs

DOWN, UP = 0, 1
"""Kinds of items: dA = dS^T drop(x), and dB = dy^T s."""
BLOCK_FEATURES = 128
"""Features of an item: two warpgroups of 64."""
_STEP_ROWS = 64
"""Rows that a block takes at once."""
_KERNEL_WIDTH = np.array([0, 16, 32, 64, 64, 128, 128, 128, 128])
"""Rank columns that the kernel computes for so many chunks."""
_WORKSPACE_PER_WIDTH = 2
"""Rank columns whose sums over 128 features fill a unit of the workspace, 256 fp32."""
_BEGIN, _END, _COUNT, _PARTS, _WORKSPACE, _COUNTER, _KIND = 0, 1, 6, 11, 12, 13, 14


@dataclass(frozen=True, kw_only=True, slots=True)
class SumInput:
    """A wide input, `[rows of the window, in_columns]`, and how its sums are cut."""

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


class _Cells:
    """Blocks of every slot's sums: `[slots, targets]`, or all targets as one."""

    def __init__(self, plan: PlanTensors, widths: Sequence[int]) -> None:
        shape = (len(plan.layout.ranks), len(widths))
        chunks = plan.slot_chunks
        if len(widths) != chunks.shape[1]:
            chunks = chunks.sum(axis=1, keepdims=True)
        self.chunks = chunks
        self.widths = np.array(widths, dtype=np.int64)
        begins = np.array(plan.layout.a_begin, dtype=np.int64).reshape(shape[0], -1)
        self.arena_rows = begins[:, : shape[1]]
        self.blocks = -(-self.widths // BLOCK_FEATURES)
        self.passes = -(-chunks // ITEM_CHUNKS)
        self.per_target = self.passes * self.blocks
        """Blocks of a slot and target: feature blocks, each in its passes."""


def sum_items(plan: PlanTensors, inputs: Sequence[SumInput]) -> ItemList:
    """Items of all inputs, those that move most bytes first: so all blocks end about together.

    Of equal ones those of dy come first, which need not wait for dS, and of them those of later
    rows, which the cache still holds from the pass before.
    """
    lists, workspace, counters = [], 0, 0
    for each in inputs:
        items, used, counted = _items_of(plan, each)
        shared = items[:, _PARTS] > 1
        items[shared, _WORKSPACE] += workspace
        items[shared, _COUNTER] += counters
        lists.append(items)
        workspace, counters = workspace + used, counters + counted
    items = np.concatenate(lists)
    begin, up = items[:, _BEGIN], items[:, _KIND] == UP
    order = np.lexsort((np.where(up, -begin, begin), ~up, -moved_bytes(items)))
    return ItemList(items=items[order], workspace=workspace)


def moved_bytes(items: Array) -> Array:
    """Bytes that each item reads and writes."""
    count = items[:, _COUNT]
    panels = 2 + np.where(count > ITEM_CHUNKS // 2, 2, 1)
    steps = -(-(items[:, _END] - items[:, _BEGIN]) // _STEP_ROWS)
    sums = np.where(items[:, _PARTS] > 1, _KERNEL_WIDTH[count], count * RANK_CHUNK)
    return steps * panels * _STEP_ROWS * 128 + 2 * sums * BLOCK_FEATURES * 4


def _items_of(plan: PlanTensors, source: SumInput) -> tuple[Array, int, int]:
    """Items of one input, units of workspace and counters that they use."""
    cut = _Cells(plan, source.widths)
    runs = row_runs(plan.ends, plan.layout, source.rows_per_run, source.window)
    table: Array = np.array(runs, dtype=np.int64).reshape(len(runs), 5)
    slot, begin, end, part, parts = table.T
    cells = cut.per_target[slot]
    cell, within = spread(cells.ravel())
    run, target = np.divmod(cell, max(len(cut.widths), 1))
    k, block = np.divmod(within, cut.blocks[target])
    feature = block * BLOCK_FEATURES
    count = np.minimum(cut.chunks[slot[run], target] - ITEM_CHUNKS * k, ITEM_CHUNKS)
    arena_row = cut.arena_rows[slot[run], target] + ITEM_CHUNKS * RANK_CHUNK * k
    first, second = (_input_columns(source, target, feature + h) for h in (0, 64))
    workspace, counter, used, counted = _workspace(cells, table, run, target, within, count)
    fields = (
        begin[run],
        end[run],
        first,
        second,
        feature,
        cut.widths[target],
        count,
        arena_row - cut.arena_rows[slot[run], 0],
        arena_row,
        slot[run],
        part[run],
        parts[run],
        workspace,
        counter,
        source.kind,
    )
    return item_array(fields, len(run)), used, counted


def _workspace(
    cells: Array, table: Array, run: Array, target: Array, within: Array, count: Array
) -> tuple[Array, Array, int, int]:
    """Where the parts of one block lie, which counter they share, and how much there is of all."""
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
    """The input's column of a feature; beyond the last, where reads are zeros, if there is none."""
    if not source.columns:
        return np.minimum(feature, source.in_columns)
    found = np.full(len(feature), source.in_columns, dtype=np.int64)
    for p, c in enumerate(source.columns):
        mine = (target == p) & (feature < c.size)
        group, inside = np.divmod(feature[mine], c.width)
        found[mine] = group * c.stride + c.begin + inside
    return found


def sum_bounds(plan: PlanTensors, inputs: Sequence[SumInput]) -> ItemBounds:
    """The most items and workspace of any micro-batch."""
    bounds = [_bounds_of(plan, each) for each in inputs]
    return ItemBounds(
        items=sum(b.items for b in bounds), workspace=sum(b.workspace for b in bounds)
    )


def _bounds_of(plan: PlanTensors, source: SumInput) -> ItemBounds:
    cut = _Cells(plan, source.widths)
    per_run = int(cut.per_target.sum(axis=1).max(initial=0))
    slots = min(len(plan.layout.ranks), plan.num_rows)
    runs = plan.num_rows // source.rows_per_run + slots
    full, rest = np.divmod(cut.chunks, ITEM_CHUNKS)
    ranks = full * _KERNEL_WIDTH[ITEM_CHUNKS] + _KERNEL_WIDTH[rest]
    units = int((ranks // _WORKSPACE_PER_WIDTH * cut.blocks).sum(axis=1).max(initial=0))
    # Only segments of several runs keep parts. Two runs have more rows than one could, so many
    # short segments keep none; a window may cut the first run of one segment short.
    parts = 2 * plan.num_rows // (source.rows_per_run + 1) + 2
    return ItemBounds(items=runs * per_run, workspace=min(runs, parts) * units)


@functools.cache
def rows_per_run(row_budget: int, features: int, blocks: int) -> int:
    """Rows of a run: so many that the runs of one adapter give each multiprocessor a block.

    Shorter ones leave more partial sums, longer ones idle multiprocessors (H200, 2048 and 8192
    rows of 4096 features: the best of 256 to 2048). It depends on sizes alone, never on segments,
    as the order of a job's sums does.

    Args:
        row_budget: `RowGroups.row_budget`.
    """
    wanted = row_budget * -(-features // BLOCK_FEATURES) / blocks
    return min(4096, max(256, 2 ** round(np.log2(max(wanted, 1)))))
