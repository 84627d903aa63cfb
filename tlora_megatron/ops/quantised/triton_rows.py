"""The kernel of `ops.quantised.rows.encode_rows`: each row is read once, and held in registers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.quantised.triton_codes import rounds_by_hand, store_codes, times_fold
from tlora_megatron.ops.warm_kernel import WarmKernel

_GROUP = 128
"""Columns that may share a scale: no tile has fewer."""
_TILE = 4096
"""Values of a thread block where rows are narrower. Of wider rows few blocks fit a multiprocessor:
those stay on it, and copy their next rows to shared memory while they work on one."""
_REDUCTION_BYTES = 4096
"""Shared memory that reductions take, at most."""


@triton.jit(do_not_specialize=["num_rows"])
def _encode_kernel(
    x: tl.tensor,  # [num_rows, WIDTH]
    fold: tl.tensor,  # fp32 [WIDTH], with FOLDS
    codes: tl.tensor,  # uint8 [num_rows, WIDTH]
    scales: tl.tensor,  # fp32 [num_rows], or [num_rows, ceil(WIDTH / GROUP)]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FOLDS: tl.constexpr,
    BY_HAND: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, COLUMNS)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        rows = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
        at = rows[:, None] * WIDTH + columns[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if FOLDS:
            values = times_fold(values, fold, columns[None, :], num_rows, WIDTH, STAGES)
        store_codes(
            values, codes, scales, rows, num_rows, WIDTH, ROWS, COLUMNS, GROUP, BY_HAND
        )  # fmt: skip


_encode = WarmKernel(_encode_kernel, caches=True)


class RowTile(NamedTuple):
    """How a row kernel is launched."""

    rows: int
    columns: int
    num_warps: int
    stages: int
    """1 = a block for each tile; 3 = blocks of 32 warps in all stay on each multiprocessor, and
    fetch rows ahead into two buffers. With one, a row would be fetched when the one before is done.
    """

    def blocks(self, x: torch.Tensor) -> int:
        """Returns the number of blocks for the rows of x."""
        needed = -(-len(x) // self.rows)
        return needed if self.stages == 1 else min(needed, _resident(x.device, self.num_warps))


def row_tile(x_TK: torch.Tensor) -> RowTile:
    """Chooses the tile of the quantiser: 16 values a thread, 32 where rows are wide."""
    width = x_TK.shape[1]
    columns = max(_GROUP, power_of_2(width))
    rows = max(1, _TILE // columns)
    if columns <= _TILE:
        return RowTile(rows, columns, max(1, rows * columns // 512), 1)
    stages = _stages(columns * x_TK.element_size(), x_TK.device)
    return RowTile(1, columns, min(32, columns // 1024), stages)


def whole_rows(x: torch.Tensor, width: int, operands: int) -> RowTile:
    """Chooses the tile of kernels that take whole rows of several operands.

    Args:
        operands: rows of `width` columns in the dtype of x that are read for each row written.
    """
    columns = max(_GROUP, power_of_2(width))
    stages = _stages(operands * columns * x.element_size(), x.device)
    return RowTile(1, columns, max(1, min(32, columns // 256)), stages)


def launch_encode(
    x_TK: torch.Tensor,
    group: int | None,
    fold_K: torch.Tensor | None,
    tile: RowTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes and scales of `encode_rows`.

    Args:
        x_TK: contiguous.
        tile: None = that of `row_tile`.
    """
    num_rows, width = x_TK.shape
    codes, scales = empty_codes(x_TK, group)
    tile = row_tile(x_TK) if tile is None else tile
    if not num_rows:
        return codes, scales
    _encode.launch(
        tile.blocks(x_TK),
        (x_TK, scales if fold_K is None else fold_K, codes, scales),
        (num_rows,),
        (
            width,
            tile.rows,
            tile.columns,
            group or 0,
            fold_K is not None,
            rounds_by_hand(x_TK.device),
            tile.stages,
        ),
        num_warps=tile.num_warps,
    )
    return codes, scales


def empty_codes(x_TK: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for the codes and the scales of rows."""
    num_rows, width = x_TK.shape
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=x_TK.device)
    shape = (num_rows,) if group is None else (num_rows, -(-width // group))
    return codes, torch.empty(shape, dtype=torch.float32, device=x_TK.device)


@functools.cache
def power_of_2(size: int) -> int:
    """Returns the next power of two; Triton's own function is slow to call."""
    return triton.next_power_of_2(size)


@functools.cache
def _stages(row_bytes: int, device: torch.device) -> int:
    """Returns `RowTile.stages`: whether two buffers fit the shared memory of a block."""
    if device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
    return 3 if 2 * row_bytes + _REDUCTION_BYTES <= shared_bytes else 1


@functools.cache
def _resident(device: torch.device, num_warps: int) -> int:
    """Returns how many blocks stay on a device: 32 warps on each multiprocessor."""
    if device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * max(1, 32 // num_warps)
