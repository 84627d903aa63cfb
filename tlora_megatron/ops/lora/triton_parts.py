"""Parts that the Triton kernels share: common arguments, places, the end of a product, a gather."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.lora.tiling import (
    ITEM_FIELDS,
    RANK_CHUNK,
    ROW_TILE,
    WORKSPACE_UNIT,
    PlanTensors,
    WorkItems,
)
from tlora_megatron.ops.routing import RowGroups
from tlora_megatron.ops.warm_kernel import WarmKernel


def pairs_of_columns(values: Tensor, first_column: int) -> bool:
    """Returns True if dropout may work on registers of two values (`dropout.triton.drop_zero`)."""
    interpreted: bool = triton.knobs.runtime.interpret
    return not interpreted and values.element_size() == 2 and first_column % 2 == 0


def largest_rank_tile(chunks: int, limit: int) -> int:
    """Rank rows of the largest tile that so many chunks need, a power of two."""
    return min(limit, triton.next_power_of_2(max(chunks, 1) * RANK_CHUNK))


def column_mapping(columns: tuple[OutputColumns, ...], block: int) -> int:
    """How blocks of so many columns lie in the fused output: `mapped_columns`."""
    if all(c.is_whole for c in columns):
        return 0
    fits = all(c.width % block == 0 and c.stride % 8 == 0 and c.begin % 8 == 0 for c in columns)
    return 1 if fits else 2


def new_workspace(items: WorkItems, device: torch.device) -> Tensor:
    """Room for an item list's partial sums, fp32."""
    return torch.empty(max(items.workspace, 1) * WORKSPACE_UNIT, device=device)


def new_ranked(like: Tensor, plan: PlanTensors) -> Tensor:
    """Room for s or dS, `[PlanTensors.ranked_rows, ROW_TILE]`; undefined."""
    return like.new_empty(plan.ranked_rows, ROW_TILE)


def row_keys_or(rows: RowGroups, drop: bool, unused: Tensor) -> Tensor:
    """The rows' dropout keys, int32; any tensor where none is read."""
    return rows.row_keys(unused.device) if drop else unused


FIELDS = tl.constexpr(ITEM_FIELDS)
UNIT = tl.constexpr(WORKSPACE_UNIT)
CHUNK = tl.constexpr(RANK_CHUNK)
TILE = tl.constexpr(ROW_TILE)


@triton.jit
def mapped_columns(
    begin: tl.tensor, width: tl.tensor, stride: tl.tensor, first: tl.tensor, BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Columns of the fused output that compact columns `begin:begin + BLOCK` of a target are.

    Args:
        width, stride, first: of the target (`ops.lora.linear_ops`, where `first` is `begin`).
        MAPPED: 0 = all are the target's, in order; 1 = a block lies in one group, at 16 bytes;
            2 = anything.
    """
    if MAPPED == 0:
        return begin + tl.arange(0, BLOCK)
    if MAPPED == 1:
        start = begin // width * stride + first + begin % width
        return tl.multiple_of(start, 8) + tl.arange(0, BLOCK)
    compact = begin + tl.arange(0, BLOCK)
    return compact // width * stride + first + compact % width


@triton.jit
def store_block(
    sums: tl.tensor,
    item: tl.tensor,  # pointer
    live: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,  # pointer
    row_form: tl.tensor,
    chunks: tl.tensor,  # pointer
    num_rank: tl.tensor,
    BM: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """Writes fp32 `[M, R]`, scaled, in row form and transposed to its chunks.

    In the chunks it is 0 in the rows of others, also where the weights are not finite.

    Args:
        row_form: row of `out` from which on the row form lies.
    """
    rank = tl.arange(0, R)
    in_rank = rank < num_rank
    values = tl.where(live[:, None], sums * scale, 0.0).to(out.dtype.element_ty)
    row_size = tl.load(item + 16) * CHUNK
    place = row_form.to(tl.int64) * TILE + tl.load(item + 7).to(tl.int64) * CHUNK
    offsets = tl.arange(0, BM).to(tl.int64)[:, None] * row_size + rank[None, :]
    tl.store(out + place + offsets, values, mask=live[:, None] & in_rank[None, :])
    chunk = tl.load(chunks + tl.load(item + 6) + rank // CHUNK, mask=in_rank, other=0)
    out_rows = (chunk * CHUNK + rank % CHUNK).to(tl.int64) * TILE
    columns = tl.multiple_of(tl.load(item) % TILE, BM) + tl.arange(0, BM)
    pointers = out + out_rows[:, None] + columns[None, :]
    tl.store(pointers, tl.trans(values), mask=in_rank[:, None])


@triton.jit
def finish_block(
    sums: tl.tensor,
    item: tl.tensor,  # pointer
    live: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,  # pointer
    row_form: tl.tensor,
    chunks: tl.tensor,  # pointer
    workspace: tl.tensor,  # pointer
    counters: tl.tensor,  # pointer
    num_rank: tl.tensor,
    BM: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Writes the block, or its share; the last program of a split block adds the shares up.

    Args:
        SPLIT: whether any block is split.
    """
    if SPLIT:
        splits = tl.load(item + 11)
        if splits > 1:
            size = num_rank * BM
            part = workspace + tl.load(item + 12).to(tl.int64) * UNIT
            rank = tl.arange(0, R)
            offsets = tl.arange(0, BM)[:, None] * num_rank + rank[None, :]
            mask = (rank < num_rank)[None, :]
            tl.store(part + tl.load(item + 10) * size + offsets, sums, mask=mask)
            # All threads' stores precede the arrival, which releases them to the last program.
            tl.debug_barrier()
            counter = counters + tl.load(item + 13)
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                tl.store(counter, 0)
                sums = tl.zeros([BM, R], dtype=tl.float32)
                for k in range(splits):
                    share = part + k * size + offsets
                    sums += tl.load(share, mask=mask, other=0.0, cache_modifier=".cg")
                store_block(sums, item, live, scale, out, row_form, chunks, num_rank, BM, R)
        else:
            store_block(sums, item, live, scale, out, row_form, chunks, num_rank, BM, R)
    else:
        store_block(sums, item, live, scale, out, row_form, chunks, num_rank, BM, R)


_BLOCK = 1024
"""Values of a thread block, 8 a thread."""
_WARPS = 4


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(
    values: tl.tensor,
    places: tl.tensor,  # int32 [count]
    out: tl.tensor,  # [count]
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < count, other=0)
    found = tl.load(values + (place - 1), mask=place > 0, other=0.0)
    tl.store(out + at, found, mask=at < count)


_gather = WarmKernel(_gather_kernel)


def gather(values: Tensor, places: Tensor) -> Tensor:
    """Returns `values[places - 1]`, 0 where a place is 0.

    Args:
        values: contiguous, read as a flat tensor.
        places: int32 `[n]`.
    """
    count = places.numel()
    out = values.new_empty(count)
    _gather.launch(
        -(-count // _BLOCK), (values, places, out), (count,), (_BLOCK,), num_warps=_WARPS
    )
    return out
