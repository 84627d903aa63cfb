"""Work items of the Triton kernels: pure functions of a plan.

An item holds everything its program must know, so that the program begins to stream after one
access. Its fields, by kernel:

    rank product (down; dS): row0, begin, end, weight row, rank rows, slot, chunk entry, place in
        the row form, depth begin, depth end, split, splits, workspace, counter, target, kind,
        chunks of a row in the row form
    outer product (dB; dA): begin, end, -, place in the row form, rank rows, gradient row, column
        begin, column end, part, parts, workspace, counter, slot, width, target, kind, chunks of a
        row in the row form, borders of portions, place of the first border

A rank product reads a block of rows and writes `[rank rows, rows]` of s or dS; rows `begin:end` of
the block are the slot's, and depth 0 means that none is. An outer product sums over rows
`begin:end`. Shapes: BM rows of a block, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlora_megatron.ops.host_copy import Array
from tlora_megatron.ops.lora.tiling import (
    RANK_CHUNK,
    ROW_TILE,
    WORKSPACE_UNIT,
    ItemList,
    PlanTensors,
    item_array,
    spread,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DownConfig:
    """Blocks of `s = scaling * drop(x) A^T`."""

    block_rows: int = 64
    """Rows of a program; a divisor of the row tile."""
    block_depth: int = 64
    """Features that one step of its loop reads."""
    rank_tile: int = 128
    """Rank rows of a program at most; a slot with more takes several."""
    splits: int = 2
    """Programs that share the features of one block; their fp32 parts are summed in order."""
    num_warps: int = 4
    num_stages: int = 4
    """For up to 64 rank rows; programs with more have one stage less, to stand beside others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpConfig:
    """Blocks of `s B^T` and `drop(dS A)`, which the base GEMM then adds to."""

    block_rows: int = 128
    """A divisor of the row tile."""
    block_columns: int = 64
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardUpConfig:
    """Blocks of the launch that computes dS and dB."""

    block_rows: int = 64
    """Rows of a dS program; a divisor of the row tile."""
    block_depth: int = 128
    """Columns of dy that one step of a dS program reads."""
    split_columns: int = 4096
    """Columns of dy that a dS program sums at most: more are split and summed in order."""
    block_columns: int = 128
    """Columns of a dB block."""
    step_rows: int = 64
    """Rows that one step of a dB program reads."""
    rows_per_run: int = 1024
    """Rows that a dB program sums at most."""
    item_size: int = 131072
    """Elements of dy that a dB program reads at most, where it could take more columns."""
    region_rows: int = 1024
    """dS and dB programs of as many rows stand together, so that L2 serves the second read."""
    rank_tile: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardDownConfig:
    """Blocks of `dA += dS^T drop(x)`; fields as in `BackwardUpConfig`."""

    block_columns: int = 128
    step_rows: int = 64
    rows_per_run: int = 1024
    item_size: int = 131072
    rank_tile: int = 128
    num_warps: int = 4
    """For up to 64 rank rows; programs with more have as many times the warps."""
    num_stages: int = 3
    """A fourth gains 3 % on an H200, but may not fit where blocks have 100 KiB of shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Blocks of all kernels of one linear at one budget of rows."""

    down: DownConfig = DownConfig()
    up: UpConfig = UpConfig()
    backward_up: BackwardUpConfig = BackwardUpConfig()
    backward_down: BackwardDownConfig = BackwardDownConfig()


_FEW_ROWS = KernelConfig(
    backward_up=BackwardUpConfig(block_depth=64, split_columns=2048, num_warps=8),
    backward_down=BackwardDownConfig(rank_tile=64, num_warps=8),
)
_MANY_ROWS = KernelConfig()


def kernel_config(row_budget: int) -> KernelConfig:
    """Returns the blocks for all micro-batches of a run: they decide orders of sums.

    Searched offline on an H200 (bf16, torch 2.11, Triton 3.6) for up to and for more than 2048
    rows: `backward_up` takes 74 us where one set of blocks for all budgets took 83.

    Args:
        row_budget: `RowGroups.row_budget`.
    """
    return _FEW_ROWS if row_budget <= 2048 else _MANY_ROWS


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
        plan.b_begin[slot, target],
        plan.a_begin[slot, target],
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


RANK_PRODUCT, OUTER_PRODUCT = 0, 1
_ROW0, _BEGIN, _END, _RANK, _DEPTH0, _DEPTH1 = 0, 1, 2, 4, 8, 9
_SPLIT, _SPLITS, _WORKSPACE, _COUNTER, _KIND = 10, 11, 12, 13, 15


def down_items(
    plan: PlanTensors, config: DownConfig, depth: int, window: tuple[int, int] | None = None
) -> ItemList:
    """Items of `s = scaling * drop(x) A^T`: all targets of a slot are one product.

    Args:
        depth: features K.
        window: of the rows that count; s must be 0 in the others already.
    """
    split = -(-depth // config.splits)
    split = -(-split // config.block_depth) * config.block_depth
    items = _rank_products(
        plan,
        config,
        chunks=plan.row_chunks[plan.pair_slot],
        weight_rows=plan.a_begin[plan.pair_slot, 0],
        before=np.zeros_like(plan.pair_slot),
        depth=depth,
        split_depth=split,
        target=0,
    )
    if window is not None:
        begin = np.maximum(items[:, _BEGIN], window[0])
        end = np.minimum(items[:, _END], window[1])
        row0 = items[:, _ROW0]
        held = np.maximum(begin, row0) < np.minimum(end, row0 + config.block_rows)
        items[:, _BEGIN], items[:, _END] = begin, end
        items = items[held]
    return _numbered(items, config.block_rows)


def backward_up_items(
    plan: PlanTensors, config: BackwardUpConfig, columns: Sequence[int]
) -> ItemList:
    """Items of dS and dB, ordered by regions of dy that L2 holds until both have read them.

    Args:
        columns: N of each target.
    """
    products, outers, rows = [], [], (0, plan.num_rows)
    for p, num_columns in enumerate(columns):
        products.append(
            _rank_products(
                plan,
                config,
                chunks=plan.slot_chunks[plan.pair_slot, p],
                weight_rows=plan.b_begin[plan.pair_slot, p],
                before=plan.slot_chunks[plan.pair_slot, :p].sum(axis=1),
                depth=num_columns,
                split_depth=config.split_columns,
                target=p,
            )
        )
        outers.append(_outer_products(plan, config, plan.slot_chunks[:, p], num_columns, p, rows))
    first = _numbered(np.concatenate(products), config.block_rows)
    second = _grouped(outers, config.block_columns, first.workspace, len(first.items))
    items = np.concatenate([first.items, second.items])
    borders = plan.runs(config.rows_per_run, rows)[1].parts
    return ItemList(items=_by_region(items, config), workspace=second.workspace, borders=borders)


def backward_down_items(
    plan: PlanTensors, config: BackwardDownConfig, depth: int, window: tuple[int, int]
) -> ItemList:
    """Items of `dA += dS^T drop(x)` over the rows of a window."""
    outer = _outer_products(plan, config, plan.row_chunks, depth, 0, window)
    found = _grouped([outer], config.block_columns, 0, 0)
    return replace(found, borders=plan.runs(config.rows_per_run, window)[1].parts)


def _rank_products(
    plan: PlanTensors,
    config: DownConfig | BackwardUpConfig,
    *,
    chunks: Array,
    weight_rows: Array,
    before: Array,
    depth: int,
    split_depth: int,
    target: int,
) -> Array:
    """Blocks of each pair, those with rows split over the depth; arrays are one entry a pair.

    Args:
        before: chunks of the slot before the first one of these.
    """
    block_rows, tile_chunks = config.block_rows, config.rank_tile // RANK_CHUNK
    blocks = ROW_TILE // block_rows
    passes = -(-chunks // tile_chunks)
    pair, position = spread(passes * blocks)
    block, rank_pass = position % blocks, position // blocks
    row0 = plan.pair_tile[pair] * ROW_TILE + block * block_rows
    hit = (row0 < plan.pair_end[pair]) & (row0 + block_rows > plan.pair_begin[pair])
    splits = -(-depth // split_depth)
    owner, split = spread(np.where(hit, splits, 1))
    pair, block, rank_pass, hit = pair[owner], block[owner], rank_pass[owner], hit[owner]
    first = rank_pass * tile_chunks
    slot = plan.pair_slot[pair]
    row_chunks = plan.row_chunks[slot]
    place = plan.row_form[slot] + (row0[owner] - plan.slot_begin[slot]) * row_chunks
    begin = np.where(hit, split * split_depth, 0)
    fields = (
        row0[owner], plan.pair_begin[pair], plan.pair_end[pair],
        weight_rows[pair] + RANK_CHUNK * first,
        RANK_CHUNK * np.minimum(chunks[pair] - first, tile_chunks), slot,
        plan.pair_first[pair] + before[pair] + first, place + before[pair] + first, begin,
        np.where(hit, np.minimum(begin + split_depth, depth), 0), split, np.where(hit, splits, 1),
        0, 0, target, RANK_PRODUCT, row_chunks,
    )  # fmt: skip
    return item_array(fields, len(owner))


def _numbered(items: Array, block_rows: int) -> ItemList:
    """Gives split blocks their workspace and counter; in row order, blocks without rows last."""
    order = np.lexsort((items[:, _SPLIT], items[:, _ROW0], items[:, _DEPTH1] == 0))
    first = items[:, _SPLIT] == 0
    units = items[:, _RANK] * block_rows // WORKSPACE_UNIT * items[:, _SPLITS]
    sizes = np.where(first & (items[:, _SPLITS] > 1), units, 0)
    group = np.arange(len(items)) - items[:, _SPLIT]
    items[:, _WORKSPACE] = (np.cumsum(sizes) - sizes)[group]
    items[:, _COUNTER] = group
    return ItemList(items=items[order], workspace=int(sizes.sum()))


def _outer_products(
    plan: PlanTensors,
    config: BackwardUpConfig | BackwardDownConfig,
    chunks: Array,
    num_columns: int,
    target: int,
    window: tuple[int, int],
) -> Array:
    """Returns blocks of columns of each run; `chunks` has an entry a slot."""
    run, borders = plan.runs(config.rows_per_run, window)
    held = chunks[run[:, 0]] > 0
    slot, begin, end, part, parts, _ = run[held].T
    block = config.block_columns
    rows = np.where(parts > 1, config.rows_per_run, end - begin)
    wide = block * np.maximum(config.item_size // (rows * block), 1)
    width = np.minimum(wide, -(-num_columns // block) * block)
    tile = config.rank_tile // RANK_CHUNK
    passes, per_pass = -(-chunks[slot] // tile), -(-num_columns // width)
    owner, position = spread(passes * per_pass)
    slot, rank_pass = slot[owner], position // per_pass[owner]
    column = position % per_pass[owner] * width[owner]
    first = rank_pass * tile
    # A part's items lie as far behind those of part 0 as all the parts between have items.
    group = position + (np.cumsum(passes * per_pass) - passes * per_pass)[owner - part[owner]]
    row_chunks = plan.row_chunks[slot]
    place = plan.row_form[slot] + (begin[owner] - plan.slot_begin[slot]) * row_chunks
    fields = (
        begin[owner], end[owner], 0, place + plan.slot_chunks[slot, :target].sum(axis=1) + first,
        RANK_CHUNK * np.minimum(chunks[slot] - first, tile),
        plan.a_begin[slot, target] + RANK_CHUNK * first, column,
        np.minimum(column + width[owner], num_columns), part[owner], parts[owner], 0, group, slot,
        width[owner], target, OUTER_PRODUCT, row_chunks, borders.counts[held][owner],
        borders.places[held][owner],
    )  # fmt: skip
    return item_array(fields, len(owner))


def _grouped(lists: Sequence[Array], block: int, workspace: int, counters: int) -> ItemList:
    """Gives the parts of a sum their common workspace and counter, beyond those already given."""
    numbered = []
    for items in lists:
        rank, part, parts, group, width = items[:, (4, 8, 9, 11, 13)].T
        padded = -(-np.minimum(width, items[:, 7] - items[:, 6]) // block) * block
        sizes = np.where((part == 0) & (parts > 1), parts * rank * padded // WORKSPACE_UNIT, 0)
        items[:, 10] = workspace + (np.cumsum(sizes) - sizes)[group]
        items[:, 11] = counters + group
        workspace += int(sizes.sum())
        counters += len(items)
        numbered.append(items)
    return ItemList(items=np.concatenate(numbered), workspace=workspace)


def _by_region(items: Array, config: BackwardUpConfig) -> Array:
    """Sorts by rows, target and columns; blocks without rows, which read nothing, last."""
    outer = items[:, _KIND] == OUTER_PRODUCT
    row = np.where(outer, items[:, 0], items[:, _ROW0]) // config.region_rows
    column = np.where(outer, items[:, 6], items[:, _DEPTH0]) // config.split_columns
    idle = ~outer & (items[:, _DEPTH1] == 0)
    return items[np.lexsort((column, items[:, 14], row, idle))]
