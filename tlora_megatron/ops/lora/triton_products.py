"""Products of rows with rank rows, as s and dS are.

A program multiplies a block of rows with the rank rows of one slot, over all columns or a share of
them. Shares go to a workspace in fp32; the last program to arrive adds them up in order.
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
    finish_block,
    largest_rank_tile,
    mapped_columns,
    new_ranked,
    new_workspace,
    pairs_of_columns,
    row_keys_or,
)
from tlora_megatron.ops.lora.triton_work_items import DownConfig, down_items


@triton.jit
def rank_product(
    x: tl.tensor,  # pointer
    x_stride: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    weight: tl.tensor,  # pointer to the first rank row
    weight_stride: tl.tensor,
    num_rank: tl.tensor,
    depth0: tl.tensor,
    depth1: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    hash_M: tl.tensor,
    below: tl.tensor,
    first_column: tl.tensor,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    MAPPED: tl.constexpr,
    DROP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """`drop(x)[rows, depth0:depth1] weight[:num_rank, depth0:depth1]^T`, fp32 `[M, R]`.

    Args:
        EVEN: `depth1 - depth0` is a multiple of BLOCK.
    """
    rank = tl.arange(0, R)
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + rank.to(tl.int64)[:, None] * weight_stride
    sums = tl.zeros([rows.shape[0], R], dtype=tl.float32)
    for step in tl.range(0, tl.cdiv(depth1 - depth0, BLOCK), num_stages=STAGES):
        begin = depth0 + step * BLOCK
        compact = begin + tl.arange(0, BLOCK)
        x_mask = live[:, None]
        weight_mask = (rank < num_rank)[:, None]
        if not EVEN:
            x_mask = x_mask & (compact < depth1)[None, :]
            weight_mask = weight_mask & (compact < depth1)[None, :]
        x_columns = mapped_columns(begin, width, stride, first, BLOCK, MAPPED)
        values = tl.load(x_rows + x_columns[None, :], mask=x_mask, other=0.0)
        factor = tl.load(weight_rows + compact[None, :], mask=weight_mask, other=0.0)
        if DROP:
            values = drop_zero(values, hash_M, (first_column + compact)[None, :], below, PAIRS)
        sums = tl.dot(values, tl.trans(factor), sums)
    return sums


@triton.jit
def _down_block(
    item: tl.tensor,  # pointer
    x: tl.tensor,  # pointer
    first_row: tl.tensor,
    x_stride: tl.tensor,
    lora_a: tl.tensor,  # pointer
    s: tl.tensor,  # pointer
    row_form: tl.tensor,
    chunks: tl.tensor,  # pointer
    workspace: tl.tensor,  # pointer
    counters: tl.tensor,  # pointer
    scaling: tl.tensor,  # pointer
    dropout: tl.tensor,  # pointer
    row_keys: tl.tensor,  # pointer
    dropout_key: tl.tensor,
    first_column: tl.tensor,
    depth: tl.tensor,
    BM: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    DROP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    rows = tl.load(item) + tl.arange(0, BM)
    live = (rows >= tl.load(item + 1)) & (rows < tl.load(item + 2))
    num_rank = tl.multiple_of(tl.load(item + 4), CHUNK)
    slot = tl.load(item + 5)
    depth0 = tl.multiple_of(tl.load(item + 8), BLOCK)
    depth1 = tl.load(item + 9)
    scale = tl.load(scaling + slot)
    hash_M = rows[:, None].to(tl.uint32)
    below = slot.to(tl.uint32)
    if DROP:
        p = tl.load(dropout + slot)
        scale = scale * (1.0 / (1.0 - p))
        below = dropped_below(p)
        hash_M = row_hash(row_keys, rows, live, dropout_key)[:, None]
    sums = rank_product(
        x, x_stride, rows - first_row, live, lora_a + tl.load(item + 3).to(tl.int64) * depth, depth,
        num_rank, depth0, depth1, 1, 1, 0, hash_M, below, first_column, R, BLOCK, STAGES, EVEN, 0,
        DROP, PAIRS,
    )  # fmt: skip
    finish_block(
        sums, item, live, scale, s, row_form, chunks, workspace, counters, num_rank, BM, R, SPLIT
    )


@triton.jit(do_not_specialize=["first_row", "row_form", "dropout_key", "first_column"])
def _down_kernel(
    items: tl.tensor, x: tl.tensor, first_row: tl.tensor, x_stride: tl.tensor, lora_a: tl.tensor,
    s: tl.tensor, row_form: tl.tensor, chunks: tl.tensor, workspace: tl.tensor, counters: tl.tensor,
    scaling: tl.tensor, dropout: tl.tensor, row_keys: tl.tensor, dropout_key: tl.tensor,
    first_column: tl.tensor, depth: tl.tensor, BM: tl.constexpr, MAX_R: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    DROP: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    item = items + tl.program_id(0) * FIELDS
    num_rank = tl.load(item + 4)
    # A rank-4 adapter does the work of a rank-16 one, whoever stands beside it.
    for EXPONENT in tl.static_range(4, 9):
        if 2**EXPONENT <= MAX_R:
            above = num_rank > (0 if EXPONENT == 4 else 2**EXPONENT // 2)
            if above & (num_rank <= 2**EXPONENT):
                _down_block(
                    item, x, first_row, x_stride, lora_a, s, row_form, chunks, workspace, counters,
                    scaling, dropout, row_keys, dropout_key, first_column, depth, BM, 2**EXPONENT,
                    BLOCK, STAGES, EVEN, SPLIT, DROP, PAIRS,
                )  # fmt: skip


def down(
    x_TK: Tensor, linear: KernelLinear, config: DownConfig, window: tuple[int, int] | None = None
) -> Tensor:
    """Returns s, `[PlanTensors.ranked_rows, ROW_TILE]` in the dtype of x."""
    factors, plan, depth = linear.factors, linear.plan, x_TK.shape[1]
    items = plan.work_items(
        ("down", config, depth, window),
        lambda p: down_items(p, config, depth, window),
    )
    s = new_ranked(x_TK, plan)
    if window is not None:
        s.zero_()
    if not items.count:
        return s
    drop = factors.uses_dropout(linear.rows)
    rank_tile = largest_rank_tile(plan.most_chunks, config.rank_tile)
    num_stages = config.num_stages if rank_tile <= 64 else max(config.num_stages - 1, 1)
    _down_kernel[(items.count,)](
        items.items, x_TK, 0 if window is None else window[0], x_TK.stride(0), factors.lora_a, s,
        plan.num_chunks * RANK_CHUNK, plan["chunks"], new_workspace(items, x_TK.device),
        items.counters, factors.scaling, factors.dropout,
        row_keys_or(linear.rows, drop, plan["chunks"]), factors.dropout_key, factors.first_column,
        depth, BM=config.block_rows, MAX_R=rank_tile, BLOCK=config.block_depth, STAGES=num_stages,
        EVEN=depth % config.block_depth == 0, SPLIT=config.splits > 1, DROP=drop,
        PAIRS=pairs_of_columns(x_TK, factors.first_column), num_warps=config.num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    return s


@triton.jit
def ds_block(
    item: tl.tensor,  # pointer
    dy: tl.tensor,  # pointer
    dy_stride: tl.tensor,
    lora_b: tl.tensor,  # pointer to addresses
    ds: tl.tensor,  # pointer
    row_form: tl.tensor,
    chunks: tl.tensor,  # pointer
    columns: tl.tensor,  # pointer
    workspace: tl.tensor,  # pointer
    counters: tl.tensor,  # pointer
    scaling: tl.tensor,  # pointer
    BM: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """A block of dS, or its share of one."""
    rows = tl.load(item) + tl.arange(0, BM)
    live = (rows >= tl.load(item + 1)) & (rows < tl.load(item + 2))
    num_rank = tl.multiple_of(tl.load(item + 4), CHUNK)
    target = tl.load(item + 14)
    scale = tl.load(scaling + tl.load(item + 5))
    depth0 = tl.multiple_of(tl.load(item + 8), BLOCK)
    depth1 = tl.load(item + 9)
    columns += target * 4
    stride = tl.load(columns + 3)
    weight = tl.load(lora_b + target).to(tl.pointer_type(dy.dtype.element_ty))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        stride = tl.multiple_of(stride, 8)
    weight += tl.load(item + 3).to(tl.int64) * stride
    sums = rank_product(
        dy, dy_stride, rows, live, weight, stride, num_rank, depth0, depth1, tl.load(columns),
        tl.load(columns + 1), tl.load(columns + 2), rows[:, None].to(tl.uint32),
        target.to(tl.uint32), 0, R, BLOCK, STAGES, EVEN, MAPPED, False, False,
    )  # fmt: skip
    finish_block(
        sums, item, live, scale, ds, row_form, chunks, workspace, counters, num_rank, BM, R, True
    )
