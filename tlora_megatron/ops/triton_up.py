"""The rank part of y and of dx, `s B^T` and `drop(dS A)`, for the base GEMM to add to.

A program owns a block of the output and goes through the adapters whose rows lie in it.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from tlora_megatron.ops.factors import SiteFactors
from tlora_megatron.ops.kernel_config import UpConfig
from tlora_megatron.ops.plan_tensors import ItemBounds, ItemList, PlanTensors, item_array, spread
from tlora_megatron.ops.row_groups import RowGroups
from tlora_megatron.ops.site_tables import SiteTables
from tlora_megatron.ops.tiling import RANK_CHUNK, ROW_TILE
from tlora_megatron.ops.triton_backward import column_mapping
from tlora_megatron.ops.triton_down import pairs_of_columns, row_keys_or, uses_dropout
from tlora_megatron.ops.triton_dropout import drop_zero, dropped_below, row_hash
from tlora_megatron.ops.triton_rank_product import CHUNK, FIELDS, TILE


@triton.jit
def _add_adapter(
    sums: tl.tensor,
    record: tl.tensor,  # pointer
    rows: tl.tensor,
    ranked: tl.tensor,  # pointer
    weight: tl.tensor,  # pointer
    weight_stride: tl.tensor,
    compact: tl.tensor,
    inside: tl.tensor,
    ROW_FIELD: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Adds one adapter's product in its own rows; what others hold there cannot reach them."""
    mine = (rows >= tl.load(record)) & (rows < tl.load(record + 1))
    chunk = tl.load(record + 3)
    weight += tl.load(record + ROW_FIELD).to(tl.int64) * weight_stride
    rank = tl.arange(0, CHUNK)
    weight_rows = weight + rank.to(tl.int64)[:, None] * weight_stride
    row = tl.multiple_of(tl.load(record + 7), BM)
    ranked += (chunk * CHUNK).to(tl.int64) * TILE + row
    ranked_rows = ranked + (rank * TILE)[:, None] + tl.arange(0, BM)[None, :]
    product = tl.zeros([BM, BLOCK], dtype=tl.float32)
    for i in tl.range(0, tl.load(record + 6) // CHUNK, num_stages=STAGES):
        s = tl.load(ranked_rows + i * CHUNK * TILE)
        pointers = weight_rows + i * (CHUNK * weight_stride) + compact[None, :]
        factor = tl.load(pointers, mask=inside[None, :], other=0.0)
        product = tl.dot(tl.trans(s), factor, product)
    return tl.where(mine[:, None] & inside[None, :], sums + product, sums)


@triton.jit
def _up_kernel(
    items: tl.tensor,
    s: tl.tensor,
    lora_b: tl.tensor,
    columns: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    TARGETS: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    column0 = tl.program_id(0) * BLOCK
    row_block = tl.program_id(1)
    header = items + row_block * FIELDS
    rows = row_block * BM + tl.arange(0, BM)
    out_columns = column0 + tl.arange(0, BLOCK)
    sums = tl.zeros([BM, BLOCK], dtype=tl.float32)
    for p in range(TARGETS):
        width = tl.load(columns + 4 * p)
        stride = tl.load(columns + 4 * p + 1)
        first = tl.load(columns + 4 * p + 2)
        size = tl.load(columns + 4 * p + 3)
        weight = tl.load(lora_b + p).to(tl.pointer_type(s.dtype.element_ty))
        if ALIGNED:
            weight = tl.multiple_of(weight, 16)
            size = tl.multiple_of(size, 8)
        begin = tl.load(header + p)
        end = tl.load(header + p + 1)
        compact = out_columns
        inside = out_columns < num_columns
        if MAPPED == 1:
            offset = column0 % stride
            if (offset < first) | (offset >= first + width):
                end = begin
            start = column0 // stride * width + offset - first
            compact = tl.multiple_of(start, 8) + tl.arange(0, BLOCK)
        if MAPPED == 2:
            offsets = out_columns % stride
            inside = inside & (offsets >= first) & (offsets < first + width)
            compact = out_columns // stride * width + offsets - first
        for r in range(begin, end):
            record = items + r * FIELDS
            sums = _add_adapter(
                sums, record, rows, s, weight, size, compact, inside, 4, BM, BLOCK, STAGES
            )
    mask = (rows < num_rows)[:, None] & (out_columns < num_columns)[None, :]
    if BIAS:
        sums += tl.load(bias + out_columns, mask=out_columns < num_columns, other=0.0)[None, :].to(
            tl.float32
        )
    pointers = out + rows.to(tl.int64)[:, None] * num_columns + out_columns[None, :]
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["dropout_key", "first_column"])
def _dgrad_kernel(
    items: tl.tensor,
    ds: tl.tensor,
    lora_a: tl.tensor,
    out: tl.tensor,
    dropout: tl.tensor,
    row_keys: tl.tensor,
    dropout_key: tl.tensor,
    first_column: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    TARGETS: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DROP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    column0 = tl.program_id(0) * BLOCK
    row_block = tl.program_id(1)
    header = items + row_block * FIELDS
    rows = row_block * BM + tl.arange(0, BM)
    out_columns = column0 + tl.arange(0, BLOCK)
    inside = out_columns < num_columns
    sums = tl.zeros([BM, BLOCK], dtype=tl.float32)
    p = tl.zeros([BM], dtype=tl.float32)
    for r in range(tl.load(header), tl.load(header + TARGETS)):
        record = items + r * FIELDS
        sums = _add_adapter(
            sums, record, rows, ds, lora_a, num_columns, out_columns, inside, 5, BM, BLOCK, STAGES
        )
        if DROP:
            mine = (rows >= tl.load(record)) & (rows < tl.load(record + 1))
            p = tl.where(mine, tl.load(dropout + tl.load(record + 2)), p)
    live = rows < num_rows
    if DROP:
        sums = sums * (1.0 / (1.0 - p))[:, None]
    values = sums.to(out.dtype.element_ty)
    if DROP:
        hash_M = row_hash(row_keys, rows, live, dropout_key)[:, None]
        columns = (first_column + out_columns)[None, :]
        values = drop_zero(values, hash_M, columns, dropped_below(p)[:, None], PAIRS)
    pointers = out + rows.to(tl.int64)[:, None] * num_columns + out_columns[None, :]
    tl.store(pointers, values, mask=live[:, None] & inside[None, :])


def up_items(plan: PlanTensors, block_rows: int) -> ItemList:
    """A header for every block of rows, then the records of adapters.

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


def _items(plan: PlanTensors, block_rows: int) -> torch.Tensor:
    return plan.work_items(
        ("up", block_rows),
        lambda p: up_items(p, block_rows),
        lambda p: up_bounds(p, block_rows),
    ).items


def up(
    s: torch.Tensor,
    bias_N: torch.Tensor | None,
    num_columns: int,
    factors: SiteFactors,
    tables: SiteTables,
    plan: PlanTensors,
    config: UpConfig,
) -> torch.Tensor:
    """Returns `b + s B^T`, `[T, N]`, 0 where no adapter has rows or columns."""
    out_TN = s.new_empty(plan.num_rows, num_columns)
    grid = (triton.cdiv(num_columns, config.block_columns), -(-plan.num_rows // config.block_rows))
    _up_kernel[grid](
        _items(plan, config.block_rows),
        s,
        tables.lora_b,
        tables.columns,
        s if bias_N is None else bias_N,
        out_TN,
        plan.num_rows,
        num_columns,
        TARGETS=len(factors.columns),
        BM=config.block_rows,
        BLOCK=config.block_columns,
        STAGES=config.num_stages,
        MAPPED=column_mapping(factors.columns, config.block_columns),
        ALIGNED=tables.aligned_lora_b,
        BIAS=bias_N is not None,
        num_warps=config.num_warps,
    )
    return out_TN


def up_dropped(
    ds: torch.Tensor,
    factors: SiteFactors,
    rows: RowGroups,
    plan: PlanTensors,
    config: UpConfig,
) -> torch.Tensor:
    """Returns `drop(dS A)`, `[T, K]`, 0 in rows without an adapter."""
    depth = factors.lora_a.shape[1]
    out_TK = ds.new_empty(plan.num_rows, depth)
    drop = uses_dropout(factors, rows)
    items = _items(plan, config.block_rows)
    grid = (triton.cdiv(depth, config.block_columns), -(-plan.num_rows // config.block_rows))
    _dgrad_kernel[grid](
        items,
        ds,
        factors.lora_a,
        out_TK,
        factors.dropout,
        row_keys_or(rows, drop, items),
        factors.dropout_key,
        factors.first_column,
        plan.num_rows,
        depth,
        TARGETS=factors.layout.num_targets,
        BM=config.block_rows,
        BLOCK=config.block_columns,
        STAGES=config.num_stages,
        DROP=drop,
        PAIRS=pairs_of_columns(ds, factors.first_column),
        num_warps=config.num_warps,
    )
    return out_TK
