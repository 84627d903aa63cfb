"""The steps of the CUDA kernels' blocks one by one, for `item_machine`: copies, masks, places."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tlora_megatron.ops.dropout import dropout_reference
from tlora_megatron.ops.lora.cuda_calls import Dropout, RankPart
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.lora.plan_tensors import ITEM_FIELDS

BLOCK_ROWS = 128
CHUNK = 16
PANEL = 64
TILE_ROWS = 256
UNIT = 256
Array = np.ndarray[Any, np.dtype[np.float64]]


def kernel_width(chunks: int) -> int:
    """Rank columns that a kernel computes for so many chunks."""
    assert 1 <= chunks <= 8, f"an item must have 1 to 8 chunks, got {chunks}"
    return next(width for width in (16, 32, 64, 128) if width >= CHUNK * chunks)


def box(matrix: Array, row: int, column: int, rows: int) -> Array:
    """A copy of `[rows, 64]`, zero outside the matrix: a bulk tensor copy."""
    assert column >= 0, f"a box must begin in the matrix or beyond, got column {column}"
    found = np.zeros((rows, PANEL), dtype=matrix.dtype)
    before = max(-row, 0)
    inside = matrix[row + before : max(row + rows, 0), column : column + PANEL]
    found[before : before + inside.shape[0], : inside.shape[1]] = inside
    return found


def keep_mask(dropout: Dropout, first_row: int, num_rows: int, columns: int) -> np.ndarray:
    """bool `[num_rows, columns]`: what stays of the rows from `first_row` on."""
    mine = slice(first_row, first_row + num_rows)
    slots = dropout.row_slots[mine]
    p_T = torch.where(slots < 0, 0.0, dropout.probability[slots.clamp(min=0)])
    args = dropout.row_keys[mine], p_T, dropout.key, dropout.first_column
    return (dropout_reference(torch.ones(len(slots), columns), *args) != 0).numpy()


def drop(values: Array, dropout: Dropout | None, first_row: int = 0) -> Array:
    """`values`, zero where dropped."""
    if dropout is None:
        return values
    return np.where(keep_mask(dropout, first_row, *values.shape), values, 0.0)


def output_column(c: OutputColumns, place: int) -> int:
    """The same function as in lora.cuh."""
    return place // c.width * c.stride + c.begin + place % c.width


def compact_column(c: OutputColumns, column: int) -> int:
    """The same function as in lora.cuh."""
    inside = column % c.stride - c.begin
    owned = 0 <= inside < c.width
    return column // c.stride * c.width + inside if owned else c.groups * c.width


def write_once(to: Array, values: Array) -> None:
    """Writes over poison, or over the zeros that rows outside of a window keep.

    Raises:
        AssertionError: if anything was written there before.
    """
    assert np.isnan(to).all() or not to.any(), "a place must be written once"
    to[...] = values


def item_table(items: torch.Tensor, num_items: int) -> np.ndarray:
    """The launched items that say something, `[items, ITEM_FIELDS]`.

    Raises:
        AssertionError: if an item comes after the end, where a block may have left.
    """
    assert num_items > 0, "a grid must have blocks"
    table = items.numpy().reshape(-1, ITEM_FIELDS)[:num_items]
    live = table[:, 0] >= 0
    assert (np.diff(live.astype(int)) <= 0).all(), "items must come before the end of their list"
    return table[live]


def targets_of(rank: RankPart, begin: int, end: int) -> tuple[int, int]:
    """The range of targets that write columns `begin:end`, as lora_gemm.cu finds it."""
    if not rank.factors.columns:
        return 0, rank.num_targets
    touched = [
        i
        for i, c in enumerate(rank.factors.columns)
        if any(0 <= n % c.stride - c.begin < c.width for n in range(begin, end, PANEL))
    ]
    return (touched[0], touched[-1] + 1) if touched else (0, 0)
