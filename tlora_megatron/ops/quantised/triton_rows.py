"""The kernel of `ops.quantised.rows.encode_rows`: each row is read once, and held in registers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.quantised.triton_codes import rounds_by_hand, store_codes
from tlora_megatron.ops.warm_kernel import WarmKernel

_TILE = 4096
"""Values of a thread block where rows are narrower; a wider row has a block of its own."""
_WIDE = 8192
"""Columns from which on few blocks fit a multiprocessor: those stay on it, and copy their next rows
to shared memory while they work on one."""


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
            values *= tl.load(fold + columns, mask=columns < WIDTH, other=0.0)[None, :]
        store_codes(
            values, codes, scales, rows, num_rows, WIDTH, ROWS, COLUMNS, GROUP, BY_HAND
        )  # fmt: skip


_encode = WarmKernel(_encode_kernel)


class RowTile(NamedTuple):
    """How a row kernel is launched."""

    rows: int
    columns: int
    num_warps: int
    stages: int
    """1 = a block for each tile; more = blocks of 32 warps in all stay on each multiprocessor, and
    fetch all but one of so many rows ahead."""


def row_tile(x_TK: torch.Tensor, *, folds: bool) -> RowTile:
    """Chooses the tile of rows: 16 values a thread, 32 where rows are wide."""
    return _row_tile(x_TK.shape[1], x_TK.element_size(), folds, x_TK.device)


@functools.cache
def _row_tile(width: int, value_bytes: int, folds: bool, device: torch.device) -> RowTile:
    columns = max(128, triton.next_power_of_2(width))
    rows = max(1, _TILE // columns)
    if width < _WIDE:
        return RowTile(rows, columns, max(1, rows * columns // 512), 1)
    # The factors of a fold would be fetched again with every row.
    ahead = 0 if folds else min(2, _shared_bytes(device) // (columns * value_bytes))
    return RowTile(1, columns, min(32, columns // 1024), 1 + ahead)


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
    codes, scales = codes_and_scales(x_TK, group)
    tile = row_tile(x_TK, folds=fold_K is not None) if tile is None else tile
    blocks = -(-num_rows // tile.rows)
    if tile.stages > 1 and x_TK.is_cuda:
        blocks = min(blocks, _multiprocessors(x_TK.device) * (32 // tile.num_warps))
    if not blocks:
        return codes, scales
    _encode.launch(
        blocks,
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


def codes_and_scales(x_TK: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for the codes and the scales of rows."""
    num_rows, width = x_TK.shape
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=x_TK.device)
    shape = (num_rows,) if group is None else (num_rows, -(-width // group))
    return codes, torch.empty(shape, dtype=torch.float32, device=x_TK.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _shared_bytes(device: torch.device) -> int:
    """Returns shared memory for rows, less what reductions take."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return max(0, getattr(properties, "shared_memory_per_block_optin", 0) - 4096)
