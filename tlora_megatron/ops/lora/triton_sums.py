"""Sums over rows, `rank^T values`: dA of all adapters in one launch, and dB with dS in another.

A program sums over a run of rows of one slot, for some blocks of columns. Parts of a segment with
several runs go to a workspace in fp32; the last program to arrive adds them up in order, and to the
fp32 gradients portion by portion: a job's gradient is bitwise the same wherever its rows lie.
Programs of dB and dS stand in turns, region by region of dy: L2 serves the second read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.dropout_triton import drop_zero, dropped_below, row_hash
from tlora_megatron.ops.lora.linear_ops import KernelLinear
from tlora_megatron.ops.lora.tiling import RANK_CHUNK
from tlora_megatron.ops.lora.triton_parts import (
    CHUNK,
    FIELDS,
    TILE,
    UNIT,
    column_mapping,
    largest_rank_tile,
    mapped_columns,
    new_ranked,
    new_workspace,
    pairs_of_columns,
    row_keys_or,
)
from tlora_megatron.ops.lora.triton_products import ds_block
from tlora_megatron.ops.lora.triton_work_items import (
    RANK_PRODUCT,
    BackwardDownConfig,
    BackwardUpConfig,
    backward_down_items,
    backward_up_items,
)

_RANK_PRODUCT = tl.constexpr(RANK_PRODUCT)


@triton.jit
def _gradient_places(
    grad_rows: tl.tensor,
    columns: tl.tensor,
    column_end: tl.tensor,
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Pointers to fp32 `[R, BLOCK]` in the rows at `grad_rows` (0 = none), and which there are."""
    pointers = grad_rows.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    pointers = pointers[:, None] + columns[None, :]
    mask = (grad_rows != 0)[:, None]
    if not EVEN:
        mask = mask & (columns < column_end)[None, :]
    return pointers, mask


@triton.jit
def outer_block(
    item: tl.tensor,  # pointer
    values: tl.tensor,  # pointer
    values_stride: tl.tensor,
    first_row: tl.tensor,
    ranked: tl.tensor,  # pointer to the row form of s or dS
    gradients: tl.tensor,  # pointer
    columns: tl.tensor,  # pointer
    borders: tl.tensor,  # pointer
    workspace: tl.tensor,  # pointer
    counters: tl.tensor,  # pointer
    dropout: tl.tensor,  # pointer
    row_keys: tl.tensor,  # pointer
    dropout_key: tl.tensor,
    first_column: tl.tensor,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    DROP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Blocks of columns of `rank^T drop(values)` over a run of rows.

    A loop over blocks and, within, one over steps of rows: as a single loop, which would load the
    next block while one ends, it takes half as much shared memory again and 5 % more time.
    """
    begin = tl.load(item)
    end = tl.load(item + 1)
    row_size = tl.load(item + 16) * CHUNK
    num_rank = tl.multiple_of(tl.load(item + 4), CHUNK)
    width = tl.load(columns)
    group = tl.load(columns + 1)
    first = tl.load(columns + 2)
    column0 = tl.multiple_of(tl.load(item + 6), BLOCK)
    column1 = tl.load(item + 7)
    part = tl.load(item + 8)
    parts = tl.load(item + 9)
    rank = tl.arange(0, R)
    in_rank = rank < num_rank
    gradients += tl.load(item + 5) + rank
    ranked += tl.load(item + 3).to(tl.int64) * CHUNK
    steps = tl.cdiv(end - begin, STEP)
    blocks = tl.cdiv(column1 - column0, BLOCK)
    stride = blocks * BLOCK
    size = num_rank * stride
    shares = workspace + tl.load(item + 10).to(tl.int64) * UNIT
    scale = 1.0
    below = num_rank.to(tl.uint32)
    if DROP:
        p = tl.load(dropout + tl.load(item + 12))
        scale = 1.0 / (1.0 - p)
        below = dropped_below(p)
    for b in range(blocks):
        column = column0 + b * BLOCK
        compact = column + tl.arange(0, BLOCK)
        value_columns = mapped_columns(column, width, group, first, BLOCK, MAPPED)
        sums = tl.zeros([R, BLOCK], dtype=tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            rows = begin + step * STEP + tl.arange(0, STEP)
            mask = (rows < end)[:, None]
            if not EVEN:
                mask = mask & (compact < column1)[None, :]
            pointers = values + (rows - first_row).to(tl.int64)[:, None] * values_stride
            block = tl.load(pointers + value_columns[None, :], mask=mask, other=0.0)
            if DROP:
                hash_M = row_hash(row_keys, rows, rows < end, dropout_key)[:, None]
                block = drop_zero(block, hash_M, (first_column + compact)[None, :], below, PAIRS)
            rank_offsets = (step * STEP + tl.arange(0, STEP))[:, None] * row_size + rank[None, :]
            rank_mask = (rows < end)[:, None] & in_rank[None, :]
            ranks = tl.load(ranked + rank_offsets, mask=rank_mask, other=0.0)
            sums = tl.dot(tl.trans(ranks), block, sums)
        if parts == 1:
            grad_rows = tl.load(gradients, mask=in_rank, other=0)
            places, held = _gradient_places(grad_rows, compact, column1, ALIGNED, EVEN)
            tl.store(places, tl.load(places, mask=held, other=0.0) + sums * scale, mask=held)
        else:
            share_offsets = rank[:, None] * stride + (compact - column0)[None, :]
            tl.store(shares + part * size + share_offsets, sums, mask=in_rank[:, None])
    if parts > 1:
        tl.debug_barrier()
        counter = counters + tl.load(item + 11)
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            tl.store(counter, 0)
            grad_rows = tl.load(gradients, mask=in_rank, other=0)
            num_borders = tl.load(item + 17)
            borders += tl.load(item + 18)
            for b in range(blocks):
                local = b * BLOCK + tl.arange(0, BLOCK)
                offsets = rank[:, None] * stride + local[None, :]
                places, held = _gradient_places(grad_rows, column0 + local, column1, ALIGNED, EVEN)
                # In registers from portion to portion: another thread might store what one loads.
                gradient = tl.load(places, mask=held, other=0.0)
                k = 0
                for portion in range(num_borders + 1):
                    last = tl.load(borders + portion, mask=portion < num_borders, other=parts)
                    total = tl.zeros([R, BLOCK], dtype=tl.float32)
                    while k < last:
                        share = shares + k * size + offsets
                        total += tl.load(
                            share, mask=in_rank[:, None], other=0.0, cache_modifier=".cg"
                        )
                        k += 1
                    gradient += total * scale
                tl.store(places, gradient, mask=held)


@triton.jit(do_not_specialize=["first_row", "row_form", "dropout_key", "first_column"])
def _backward_down_kernel(
    items: tl.tensor, x: tl.tensor, x_stride: tl.tensor, first_row: tl.tensor, ds: tl.tensor,
    row_form: tl.tensor, gradients: tl.tensor, borders: tl.tensor, workspace: tl.tensor,
    counters: tl.tensor, dropout: tl.tensor, row_keys: tl.tensor, dropout_key: tl.tensor,
    first_column: tl.tensor, MAX_R: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ALIGNED_GRAD: tl.constexpr, DROP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    item = items + tl.program_id(0) * FIELDS
    num_rank = tl.load(item + 4)
    for EXPONENT in tl.static_range(4, 9):
        if 2**EXPONENT <= MAX_R:
            above = num_rank > (0 if EXPONENT == 4 else 2**EXPONENT // 2)
            if above & (num_rank <= 2**EXPONENT):
                outer_block(
                    item, x, x_stride, first_row, ds + row_form.to(tl.int64) * TILE, gradients,
                    items, borders, workspace, counters, dropout, row_keys, dropout_key,
                    first_column, 2**EXPONENT, BLOCK, STEP, STAGES, EVEN, 0, ALIGNED_GRAD, DROP,
                    PAIRS,
                )  # fmt: skip


def backward_down(
    x_TK: Tensor,
    ds: Tensor,
    window: tuple[int, int],
    linear: KernelLinear,
    config: BackwardDownConfig,
) -> None:
    """Accumulates dA over the rows `window[0]:window[1]`, which are all that x holds."""
    factors, tables, plan, depth = linear.factors, linear.tables, linear.plan, x_TK.shape[1]
    items = plan.work_items(
        ("backward_down", config, depth, window),
        lambda p: backward_down_items(p, config, depth, window),
    )
    if not items.count:
        return
    drop = factors.uses_dropout(linear.rows)
    rank_tile = largest_rank_tile(plan.most_chunks, config.rank_tile)
    _backward_down_kernel[(items.count,)](
        items.items, x_TK, x_TK.stride(0), window[0], ds, plan.num_chunks * RANK_CHUNK,
        tables.grad_a, items.borders, new_workspace(items, x_TK.device), items.counters,
        factors.dropout, row_keys_or(linear.rows, drop, items.items), factors.dropout_key,
        factors.first_column, MAX_R=rank_tile, BLOCK=config.block_columns, STEP=config.step_rows,
        STAGES=config.num_stages, EVEN=depth % config.block_columns == 0,
        ALIGNED_GRAD=tables.aligned_a, DROP=drop,
        PAIRS=pairs_of_columns(x_TK, factors.first_column),
        num_warps=config.num_warps * max(1, rank_tile // 64), num_stages=config.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_form"])
def _backward_up_kernel(
    items: tl.tensor, dy: tl.tensor, dy_stride: tl.tensor, s: tl.tensor, ds: tl.tensor,
    row_form: tl.tensor, lora_b: tl.tensor, gradients: tl.tensor, columns: tl.tensor,
    borders: tl.tensor, chunks: tl.tensor, workspace: tl.tensor, counters: tl.tensor,
    scaling: tl.tensor, BM: tl.constexpr, MAX_R: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    MAPPED: tl.constexpr, ALIGNED_B: tl.constexpr, ALIGNED_GRAD: tl.constexpr,
) -> None:  # fmt: skip
    item = items + tl.program_id(0) * FIELDS
    num_rank = tl.load(item + 4)
    kind = tl.load(item + 15)
    for EXPONENT in tl.static_range(4, 9):
        if 2**EXPONENT <= MAX_R:
            above = num_rank > (0 if EXPONENT == 4 else 2**EXPONENT // 2)
            if above & (num_rank <= 2**EXPONENT):
                if kind == _RANK_PRODUCT:
                    ds_block(
                        item, dy, dy_stride, lora_b, ds, row_form, chunks, columns, workspace,
                        counters, scaling, BM, 2**EXPONENT, DEPTH, STAGES, EVEN, MAPPED, ALIGNED_B,
                    )  # fmt: skip
                else:
                    target = tl.load(item + 14)
                    outer_block(
                        item, dy, dy_stride, 0, s + row_form.to(tl.int64) * TILE, gradients,
                        columns + target * 4, borders, workspace, counters, scaling, chunks, 0, 0,
                        2**EXPONENT, BLOCK, STEP, STAGES, EVEN, MAPPED, ALIGNED_GRAD, False, False,
                    )  # fmt: skip


def backward_up(dy_TN: Tensor, s: Tensor, linear: KernelLinear, config: BackwardUpConfig) -> Tensor:
    """Accumulates dB and returns dS, `[PlanTensors.ranked_rows, ROW_TILE]` in the dtype of dy."""
    factors, tables, plan = linear.factors, linear.tables, linear.plan
    sizes = tuple(c.size for c in factors.columns)
    items = plan.work_items(
        ("backward_up", config, sizes), lambda p: backward_up_items(p, config, sizes)
    )
    ds = new_ranked(dy_TN, plan)
    if not items.count:
        return ds
    widest = max(config.block_columns, config.block_depth)
    _backward_up_kernel[(items.count,)](
        items.items, dy_TN, dy_TN.stride(0), s, ds, plan.num_chunks * RANK_CHUNK, tables.lora_b,
        tables.grad_b, tables.columns, items.borders, plan["chunks"],
        new_workspace(items, dy_TN.device), items.counters, factors.scaling, BM=config.block_rows,
        MAX_R=largest_rank_tile(plan.most_target_chunks, config.rank_tile),
        DEPTH=config.block_depth, BLOCK=config.block_columns, STEP=config.step_rows,
        STAGES=config.num_stages, EVEN=all(size % widest == 0 for size in sizes),
        MAPPED=column_mapping(factors.columns, widest), ALIGNED_B=tables.aligned_lora_b,
        ALIGNED_GRAD=tables.aligned_b, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return ds
