"""How many items and how much workspace `work_items.py` may ask for, whatever the micro-batch.

A plan that a CUDA graph replays has room for as much; a micro-batch fills part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tlora_megatron.ops.lora.plan_tensors import WORKSPACE_UNIT, ItemBounds, PlanTensors
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, ROW_TILE
from tlora_megatron.ops.lora.triton.config import BackwardDownConfig, BackwardUpConfig, DownConfig


def down_bounds(plan: PlanTensors, config: DownConfig, depth: int) -> ItemBounds:
    """Bounds of `work_items.down_items` over all micro-batches."""
    chunks = int(plan.slot_chunks.sum(axis=1).max(initial=0))
    return _rank_bounds(plan, chunks, config.block_rows, config.rank_tile, config.splits)


def backward_up_bounds(
    plan: PlanTensors, config: BackwardUpConfig, columns: Sequence[int]
) -> ItemBounds:
    """Bounds of `work_items.backward_up_items` over all micro-batches."""
    items = workspace = 0
    for p, num_columns in enumerate(columns):
        chunks = int(plan.slot_chunks[:, p].max(initial=0))
        splits = -(-num_columns // config.split_columns)
        down = _rank_bounds(plan, chunks, config.block_rows, config.rank_tile, splits)
        outer = _outer_bounds(plan, config, chunks, num_columns)
        items += down.items + outer.items
        workspace += down.workspace + outer.workspace
    return ItemBounds(items=items, workspace=workspace)


def backward_down_bounds(plan: PlanTensors, config: BackwardDownConfig, depth: int) -> ItemBounds:
    """Bounds of `work_items.backward_down_items` over all micro-batches."""
    chunks = int(plan.slot_chunks.sum(axis=1).max(initial=0))
    return _outer_bounds(plan, config, chunks, depth)


def _rank_bounds(
    plan: PlanTensors, chunks: int, block_rows: int, rank_tile: int, splits: int
) -> ItemBounds:
    slots = min(len(plan.layout.ranks), plan.num_rows)
    hits = -(-plan.num_rows // block_rows) + slots
    passes = -(-chunks * RANK_CHUNK // rank_tile)
    blocks = plan.max_pairs * (ROW_TILE // block_rows)
    units = hits * splits * chunks * RANK_CHUNK * block_rows // WORKSPACE_UNIT
    return ItemBounds(items=passes * (blocks + hits * (splits - 1)), workspace=units)


def _outer_bounds(
    plan: PlanTensors, config: BackwardUpConfig | BackwardDownConfig, chunks: int, columns: int
) -> ItemBounds:
    """A slot of n rows has at most `n / rows_per_run + 1` runs; if several, twice the quotient."""
    block, num_rows = config.block_columns, plan.num_rows
    runs = num_rows // config.rows_per_run + min(len(plan.layout.ranks), num_rows)
    passes = -(-chunks * RANK_CHUNK // config.rank_tile)
    padded = -(-columns // block) * block
    widest = max(block, config.item_size // config.rows_per_run // block * block)
    full = 2 * (num_rows // config.rows_per_run) * -(-padded // widest)
    blocks = full + 2 * num_rows * padded // max(config.item_size, 1) + runs
    several = 2 * num_rows // config.rows_per_run
    units = several * chunks * RANK_CHUNK * padded // WORKSPACE_UNIT
    return ItemBounds(items=passes * blocks, workspace=units)
