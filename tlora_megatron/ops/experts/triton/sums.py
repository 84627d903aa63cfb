"""Gradients of adapters on routed experts: `grad += s^T values`, a program a pair and column block.

A program goes through its pair's rows from the first to the last, so a gradient's bits depend on
nothing but the job's own rows. Gradients are fp32, and each element has one program.

Shapes: P pairs, Q rows, K columns, W rank rows of the widest slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.experts.rank_tables import RankRows, RankTables
from tlora_megatron.ops.experts.triton.products import chunk_of
from tlora_megatron.ops.experts.triton.rank_rows import factor_pointers, in_columns, rank_places
from tlora_megatron.ops.experts.triton.tiles import PairTiles
from tlora_megatron.ops.warm_kernel import WarmKernel

_COLUMNS = 128
_STEP = 64
"""Rows that one step reads."""


@triton.jit(do_not_specialize=["slots", "width"])
def _sums_kernel(
    begins: tl.tensor,  # int32 [P + 1]
    s: tl.tensor,  # [Q, W]
    values: tl.tensor,  # [Q, K]
    table: tl.tensor,
    widths: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    IEEE: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    pair = program // (blocks * CHUNKS)
    slot = pair % (slots + 1)
    first = program // blocks % CHUNKS * CHUNK
    if slot < slots:
        own_width = tl.load(widths + slot)
        begin, end = tl.load(begins + pair), tl.load(begins + pair + 1)
        if (first < own_width) & (begin < end):
            columns = program % blocks * BLOCK + tl.arange(0, BLOCK)
            address, low, high = rank_places(
                table, slots, width, slot, pair // (slots + 1), first, CHUNK
            )
            at = factor_pointers(address, columns, tl.float32, ALIGNED)
            held = in_columns(columns, low, high)
            rank = first + tl.arange(0, CHUNK)
            sums = tl.zeros([CHUNK, BLOCK], dtype=tl.float32)
            for row in range(begin, end, STEP):
                rows = (row + tl.arange(0, STEP)).to(tl.int64)
                live = rows < end
                s_mask = live[:, None] & (rank < own_width)[None, :]
                at_s = s + rows[:, None] * width + rank[None, :]
                ranks = tl.load(at_s, mask=s_mask, other=0.0)
                mask = live[:, None] & (columns < K)[None, :]
                at_values = values + rows[:, None] * K + columns[None, :]
                block = tl.load(at_values, mask=mask, other=0.0)
                sums = tl.dot(
                    tl.trans(ranks), block, sums, input_precision="ieee" if IEEE else "tf32"
                )
            tl.store(at, tl.load(at, mask=held, other=0.0) + sums, mask=held)


_sums = WarmKernel(_sums_kernel)


def add_sums(
    rows: RankRows, s_QW: Tensor, values_QK: Tensor, tables: RankTables, tiles: PairTiles
) -> None:
    """Adds `s^T values` of every pair to its gradients.

    Args:
        rows: of the gradients.
    """
    depth, chunk = values_QK.shape[1], chunk_of(tables.width)
    chunks, pairs = triton.cdiv(tables.width, chunk), len(tiles.begins) - 1
    _sums.launch(
        pairs * chunks * triton.cdiv(depth, _COLUMNS),
        (tiles.begins, s_QW, values_QK, rows.places_4SW, tables.widths_S),
        (tables.slots, tables.width),
        (
            depth,
            chunk,
            chunks,
            _COLUMNS,
            _STEP,
            int(rows.aligned),
            int(values_QK.dtype == torch.float32),
        ),
        num_warps=4,
    )
