"""Gradients of adapters on routed experts, and the casts of their master weights, a launch each.

A program goes through its pair's rows from the first to the last, so a gradient's bits depend on
nothing but the job's own rows. Gradients are fp32, and each element has one program.

Shapes: P pairs, Q rows, K columns, W rank rows of the widest slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.experts.branch import PlacedRows
from tlora_megatron.ops.experts.triton_tiles import (
    PairTiles,
    RankRows,
    RankTables,
    factor_pointers,
    in_columns,
    is_chunk_of,
    rank_places,
    ranks_at_once,
)
from tlora_megatron.ops.warm_kernel import WarmKernel

_COLUMNS, _STEP = 256, 32
"""Columns of a program, and rows that one step of it reads."""
_RANKS = 64
"""Most rank rows of a program."""
_STAGES = 2
"""Steps under way; one more where rows are found by their places."""


@triton.jit
def _add_block(
    s: tl.tensor, values: tl.tensor, places: tl.tensor, table: tl.tensor, slots: tl.tensor,
    width: tl.tensor, own_width: tl.tensor, slot: tl.tensor, expert: tl.tensor, begin: tl.tensor,
    end: tl.tensor, first: tl.tensor, block: tl.tensor, K: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    FITS: tl.constexpr, IEEE: tl.constexpr, PLACED: tl.constexpr,
) -> None:  # fmt: skip
    columns = block * BLOCK + tl.arange(0, BLOCK)
    address, low, high = rank_places(table, slots, width, slot, expert, first, CHUNK)
    at = factor_pointers(address, columns, tl.float32, ALIGNED)
    held = in_columns(block * BLOCK, low, high, BLOCK, FITS)
    rank = first + tl.arange(0, CHUNK)
    sums = tl.load(at, mask=held, other=0.0)
    width = tl.multiple_of(width, 16)
    filled = (own_width + 15) // 16 * 16
    for row in tl.range(begin, end, STEP, num_stages=STAGES):
        rows = (row + tl.arange(0, STEP)).to(tl.int64)
        live = rows < end
        s_mask = live[:, None] & (rank < filled)[None, :]
        ranks = tl.load(s + rows[:, None] * width + rank[None, :], mask=s_mask, other=0.0)
        mask = live[:, None]
        if K % BLOCK != 0:
            mask = mask & (columns < K)[None, :]
        if PLACED:
            rows = tl.load(places + rows, mask=live, other=0)
        block_values = tl.load(values + rows[:, None] * K + columns[None, :], mask=mask, other=0.0)
        sums = tl.dot(
            tl.trans(ranks), block_values, sums, input_precision="ieee" if IEEE else "tf32"
        )
    tl.store(at, sums, mask=held)


@triton.jit(do_not_specialize=["slots", "width"])
def _sums_kernel(
    begins: tl.tensor,  # int32 [P + 1]
    s: tl.tensor,  # [Q, W]
    values: tl.tensor,  # [Q, K], or [T, K] where PLACED
    places: tl.tensor,  # int64 [Q], or values
    table: tl.tensor,
    widths: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    MOST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FITS: tl.constexpr,
    IEEE: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    pair = program // (blocks * CHUNKS)
    slot = pair % (slots + 1)
    first = program // blocks % CHUNKS * MOST
    if slot < slots:
        own_width = tl.load(widths + slot)
        begin, end = tl.load(begins + pair), tl.load(begins + pair + 1)
        if (first < own_width) & (begin < end):
            # An adapter of a small rank does the work of a small one, whoever stands beside it.
            for EXPONENT in tl.static_range(4, 8):
                if 2**EXPONENT <= MOST:  # noqa: SIM102 - chosen when it is compiled
                    if is_chunk_of(own_width, 2**EXPONENT, MOST):
                        _add_block(
                            s, values, places, table, slots, width, own_width, slot,
                            pair // (slots + 1), begin, end, first, program % blocks, K,
                            2**EXPONENT, BLOCK, STEP, STAGES, ALIGNED, FITS, IEEE,
                            PLACED,
                        )  # fmt: skip


_sums = WarmKernel(_sums_kernel)


def add_sums(
    rows: RankRows, s_QW: Tensor, values: PlacedRows, tables: RankTables, tiles: PairTiles
) -> None:
    """Adds `s^T values` of every pair to its gradients."""
    values_TK, rows_Q = values
    depth = values_TK.shape[1]
    most = ranks_at_once(tables, _RANKS)
    chunks, pairs = triton.cdiv(tables.width, most), len(tiles.begins) - 1
    _sums.launch(
        pairs * chunks * triton.cdiv(depth, _COLUMNS),
        (
            tiles.begins,
            s_QW,
            values_TK,
            values_TK if rows_Q is None else rows_Q,
            rows.places_4SW,
            tables.widths_S,
        ),
        (tables.slots, tables.width),
        (
            depth,
            most,
            chunks,
            _COLUMNS,
            _STEP,
            _STAGES + (rows_Q is not None),
            int(rows.aligned),
            int(rows.span % _COLUMNS == 0),
            int(values_TK.dtype == torch.float32),
            int(rows_Q is not None),
        ),
        num_warps=4,
    )


_FIELDS = 7
_BLOCK = 1024


class CastFactor(NamedTuple):
    """A factor of all experts: where its master weights begin, and its place in an arena."""

    begin: int
    arena_LRN: Tensor


@triton.jit(do_not_specialize=["largest"])
def _cast_kernel(
    master: tl.tensor,  # fp32
    factors: tl.tensor,  # int64 [F, FIELDS]
    like: tl.tensor,  # its dtype is the arenas'
    defect: tl.tensor,  # fp32 [1]
    largest: tl.tensor,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    fields = factors + tl.program_id(1) * FIELDS
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(fields):
        rank = tl.load(fields + 1)
        width = tl.load(fields + 2)
        source = master + tl.load(fields + 3) + row * width
        address = tl.load(fields + 4) + row // rank * tl.load(fields + 5)
        address += row % rank * tl.load(fields + 6)
        to = address.to(tl.pointer_type(like.dtype.element_ty))
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < width
            value = tl.load(source + columns, mask=inside, other=0.0)
            value = value.to(like.dtype.element_ty).to(tl.float32)
            is_nan = value != value
            is_large = tl.abs(value) > largest
            value = tl.where(is_large, tl.where(value > 0, largest, -largest), value)
            value = tl.where(is_nan, 0.0, value)
            tl.store(to + columns, value.to(like.dtype.element_ty), mask=inside)
            if tl.sum((is_nan | is_large).to(tl.int32), 0) > 0:
                tl.store(defect, float("nan"))


_cast = WarmKernel(_cast_kernel)


class FactorCaster:
    """Writes one adapter's factors on routed experts into the arenas.

    Args:
        factors: all in the compute dtype, on one device.
    """

    def __init__(self, factors: Sequence[CastFactor]) -> None:
        rows = []
        for begin, arena in factors:
            experts, rank, width = arena.shape
            assert arena.stride(2) == 1, "a rank row lies in one piece"
            size = arena.element_size()
            steps = (arena.stride(0) * size, arena.stride(1) * size)
            rows.append((experts * rank, rank, width, begin, arena.data_ptr(), *steps))
        self._like = factors[0].arena_LRN
        self._most = max(row[0] for row in rows)
        self._table = torch.tensor(rows, dtype=torch.int64).to(self._like.device)
        self._count = len(rows)

    def write(self, master_N: Tensor) -> Tensor:
        """Writes master weights, rounded; returns fp32 `[]`: 0, or NaN where one is not finite.

        What is not finite never reaches an arena: a NaN becomes 0, the rest the largest number.
        """
        defect = master_N.new_zeros(1)
        _cast.launch(
            self._most,
            (master_N, self._table, self._like, defect),
            (torch.finfo(self._like.dtype).max,),
            (_FIELDS, _BLOCK),
            num_warps=4,
            grid_y=self._count,
        )
        return defect[0]
