"""Work items of the rank part of y and dx: pure functions of a micro-batch's segments and ranks."""

from __future__ import annotations

import numpy as np

from tlora_megatron.ops.lora.plan_tensors import (
    ItemBounds,
    ItemList,
    PlanTensors,
    item_array,
    spread,
)
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, ROW_TILE


def up_items(plan: PlanTensors, block_rows: int) -> ItemList:
    """Returns a header for every block of rows, then the records of adapters.

    Header of a block: field p is the first record of target p, field p + 1 the one after its last.
    Record: begin, end, slot, first chunk, row in the arena of B, row in the arena of A, rank rows,
    column in tile.
    """
    blocks, targets = -(-plan.num_rows // block_rows), plan.layout.num_targets
    per_tile = ROW_TILE // block_rows
    pair, block = spread(np.full(len(plan.pair_slot), per_tile))
    row0 = plan.pair_tile[pair] * ROW_TILE + block * block_rows
    hit = (row0 < plan.pair_end[pair]) & (row0 + block_rows > plan.pair_begin[pair])
    owner, target = spread(np.full(int(hit.sum()), targets))
    pair, block, row0 = pair[hit][owner], block[hit][owner], row0[hit][owner]
    slot = plan.pair_slot[pair]
    chunks = plan.slot_chunks[slot, target]
    fields = (
        plan.pair_begin[pair],
        plan.pair_end[pair],
        slot,
        plan.pair_chunks[pair, target],
        np.array(plan.layout.b_begin, dtype=np.int64)[slot, target],
        np.array(plan.layout.a_begin, dtype=np.int64)[slot, target],
        RANK_CHUNK * chunks,
        block * block_rows,
    )
    records = item_array(fields, len(owner))
    place = row0 // block_rows * targets + target
    used = chunks > 0
    order = np.argsort(place[used], kind="stable")
    counts = np.bincount(place[used], minlength=blocks * targets)
    begins = blocks + np.concatenate([[0], np.cumsum(counts)])
    headers = np.zeros((blocks, records.shape[1]), dtype=np.int64)
    for p in range(targets + 1):
        headers[:, p] = begins[p : p + blocks * targets : targets]
    return ItemList(items=np.concatenate([headers, records[used][order]]), workspace=0)


def up_bounds(plan: PlanTensors, block_rows: int) -> ItemBounds:
    """Bounds of `up_items` over all micro-batches."""
    blocks = -(-plan.num_rows // block_rows)
    records = (blocks + min(len(plan.layout.ranks), plan.num_rows)) * plan.layout.num_targets
    return ItemBounds(items=blocks + records, workspace=0)
