"""Block sizes of the Triton kernels: from a table tuned offline, never searched at run time.

`tuned.json` maps a part of a GPU's name to entries. An entry holds bounds (`rows`, `in_size`,
`out_size`: it applies up to and including these; absent = any size) and, for some kernels, the
fields that differ from the default. For each kernel the first entry that applies and names it wins.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tlora_megatron.ops.lora.tiling import ROW_TILE

_TABLE = Path(__file__).with_name("tuned.json")
_BOUNDS = ("rows", "in_size", "out_size")
T = TypeVar("T")


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
    """Of a program with up to 64 rank rows; one with more has one less, to stand beside others."""


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
    block_depth: int = 64
    """Columns of dy that one step of a dS program reads."""
    split_columns: int = 2048
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
    """Of a program with up to 64 rank rows; one with more has as many times the warps."""
    num_stages: int = 3


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


@functools.cache
def kernel_config(gpu_name: str, rows: int, in_size: int, out_size: int) -> KernelConfig:
    """The blocks for a linear `[in_size -> out_size]` on a GPU.

    Args:
        rows: that a micro-batch may have (`RowGroups.row_budget`).
    """
    sizes = {"rows": rows, "in_size": in_size, "out_size": out_size}
    return choose_config(_table(), gpu_name, sizes)


def choose_config(
    table: Mapping[str, Sequence[Mapping[str, Any]]], gpu_name: str, sizes: Mapping[str, int]
) -> KernelConfig:
    """`kernel_config` from a given table.

    Raises:
        ValueError: if the table names an unknown kernel or field, or holds an invalid value.
    """
    entries = [e for name, all_ in table.items() if name in gpu_name for e in all_]
    chosen: dict[str, Any] = {}
    for entry in entries:
        _check_names(entry, [*_BOUNDS, *(f.name for f in dataclasses.fields(KernelConfig))])
        if any(sizes[name] > entry.get(name, sizes[name]) for name in _BOUNDS):
            continue
        for part in dataclasses.fields(KernelConfig):
            if part.name in entry and part.name not in chosen:
                chosen[part.name] = _overridden(part.default, entry[part.name])
    return KernelConfig(**chosen)


def _overridden(default: T, fields: Mapping[str, int]) -> T:
    _check_names(fields, [f.name for f in dataclasses.fields(default)])  # type: ignore[arg-type]
    return dataclasses.replace(default, **fields)  # type: ignore[type-var]


def _check_names(given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"tuned.json must name one of {', '.join(known)}, got {name!r}")


@functools.cache
def _table() -> dict[str, list[dict[str, Any]]]:
    table: dict[str, list[dict[str, Any]]] = json.loads(_TABLE.read_text())
    return table
