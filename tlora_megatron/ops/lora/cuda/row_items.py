"""Work items of rank_rows.cu: pure functions of a micro-batch's segments and ranks.

An item is one cluster's work, int32 in the order in which the kernel reads it: its `Item`. At most
128 rank rows belong to an item; a slot with more takes several.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from tlora_megatron.ops.lora.plan_tensors import (
    Array,
    ItemBounds,
    ItemList,
    PlanTensors,
    item_array,
    spread,
)
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, ROW_TILE, RankLayout

BLOCK_ROWS = 128
"""Rows of an item."""
ITEM_CHUNKS = 8
"""Rank chunks of an item: `kMaxChunks` of rank_ring.cuh."""


def rank_columns(layout: RankLayout) -> int:
    """Columns of the row-major s and dS: the most chunks of any slot, a multiple of 64."""
    rows = [*(slot[0] for slot in layout.a_begin), layout.a_rows] if layout.num_targets else [0]
    widest = max((b - a for a, b in itertools.pairwise(rows)), default=0)
    return max(64, -(-widest // 64) * 64)


def row_items(plan: PlanTensors, *, per_target: bool) -> ItemList:
    """Items: those with most rows of their segment first, then in order of rows.

    Blocks start in order: what is left for multiprocessors that have a block already is short.

    Args:
        per_target: dS reads each target's own columns and arena; s reads the same x for all targets
            of a slot, whose rows are neighbours in the arena of `lora_a`.
    """
    by_target = plan.slot_chunks[plan.pair_slot]
    counts = by_target if per_target else by_target.sum(axis=1, keepdims=True)
    part, k = spread(-(-counts // ITEM_CHUNKS).ravel())
    pair, target = np.divmod(part, max(counts.shape[1], 1))
    before = (np.cumsum(counts, axis=1) - counts).ravel()[part] + ITEM_CHUNKS * k
    arena = _begins(plan.layout, per_target)[plan.pair_slot[pair], target]
    fields = [
        plan.pair_begin[pair],
        plan.pair_end[pair],
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
    return ItemList(items=items[np.lexsort((row, -reads))], workspace=0)


def row_bounds(plan: PlanTensors, *, per_target: bool) -> ItemBounds:
    """The most items of any micro-batch."""
    counts = plan.slot_chunks if per_target else plan.slot_chunks.sum(axis=1, keepdims=True)
    passes = int((-(-counts // ITEM_CHUNKS)).sum(axis=1).max(initial=0))
    return ItemBounds(items=plan.max_pairs * passes * (ROW_TILE // BLOCK_ROWS), workspace=0)


def _begins(layout: RankLayout, per_target: bool) -> Array:
    begins = layout.b_begin if per_target else tuple(slot[:1] for slot in layout.a_begin)
    return np.array(begins, dtype=np.int64).reshape(len(layout.ranks), -1)


@functools.cache
def row_parts(row_budget: int, blocks: int) -> int:
    """Blocks that share an item: 2 to 4, so many that each multiprocessor has one.

    From half as many and twice as many on an H200, over the linears of the layer benchmark: at 8192
    and 16384 rows 2 is best; at 2048 rows 8 gains 1 % with 4 adapters and loses 5 % with 64. It
    depends on sizes alone: it decides the order of sums.

    Args:
        row_budget: `RowGroups.row_budget`.
    """
    parts = blocks // max(1, -(-row_budget // BLOCK_ROWS))
    return min(4, max(2, 1 << max(0, parts.bit_length() - 1)))
