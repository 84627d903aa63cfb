"""Which linears the CUDA kernels take, and how their GEMM is cut: pure functions of sizes."""

from __future__ import annotations

import functools

from tlora_megatron.ops.dropout.masks import SEED_COLUMNS
from tlora_megatron.ops.lora.cuda.arguments import MAX_TARGETS
from tlora_megatron.ops.lora.cuda.calls import GemmTile
from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.tiling import ROW_TILE

_SPEEDS = {256: 1.0, 192: 0.93, 128: 0.9}
"""Widths of tiles and the share of the widest's speed that each reaches (H200, gemm_times of
docs/measurements)."""
_MAX_COLUMNS = 256 * max(_SPEEDS)
"""`kMaxColumnTiles` of lora_gemm.cu, all of the widest."""


def suits(factors: SiteFactors, size_out: int, size_in: int) -> bool:
    """Whether the kernels take a linear: rows of whole 16 bytes, fused columns in 64s, shards of x
    that begin where a block of the dropout mask does.

    A function of the linear alone: y of its rows must not change with the micro-batch.
    """
    columns = factors.columns
    aligned = not (size_in % 8 or size_out % 8 or factors.first_column % SEED_COLUMNS)
    fused = all(c.is_whole or not (c.begin % 64 or c.width % 64 or c.stride % 64) for c in columns)
    fits = len(columns) <= MAX_TARGETS and max(size_in, size_out) <= _MAX_COLUMNS
    return aligned and fused and fits


@functools.cache
def gemm_tile(row_budget: int, columns: int, clusters: int) -> GemmTile:
    """How to cut a GEMM for a GPU of so many clusters.

    Narrow tiles pay where the widest leaves much of the last wave idle.

    Args:
        row_budget: `RowGroups.row_budget`.
    """
    row_tiles = -(-row_budget // ROW_TILE)

    def efficiency(width: int) -> float:
        tiles = row_tiles * -(-columns // width)
        used = row_budget * columns / (tiles * ROW_TILE * width)
        return _SPEEDS[width] * used * tiles / (-(-tiles // clusters) * clusters)

    allowed = [w for w in _SPEEDS if columns * max(_SPEEDS) <= _MAX_COLUMNS * w]
    return GemmTile(max(allowed, key=efficiency))
