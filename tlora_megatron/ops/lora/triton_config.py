"""Block sizes of the Triton kernels: fixed, never searched at run time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tlora_megatron.ops.lora.tiling import ROW_TILE


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

    def __post_init__(self) -> None:
        for part in dataclasses.fields(self):
            _check(part.name, getattr(self, part.name))


def _check(part: str, config: Any) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        power = value > 0 and value & (value - 1) == 0
        if field.name.startswith("block_") or field.name in ("num_warps", "rank_tile", "step_rows"):
            if not power:
                raise ValueError(f"{part}.{field.name} must be a power of two, got {value}")
        elif value < 1:
            raise ValueError(f"{part}.{field.name} must be at least 1, got {value}")
    rows = getattr(config, "block_rows", 1)
    if ROW_TILE % rows:
        raise ValueError(f"{part}.block_rows must divide {ROW_TILE}, got {rows}")
    split = getattr(config, "split_columns", 0)
    block = max(getattr(config, name, 1) for name in ("block_columns", "block_depth"))
    if split % block:
        raise ValueError(f"{part}.split_columns must be a multiple of {block}, got {split}")


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
