"""Which linears the CUDA kernels take, and how their GEMM is cut: pure functions of sizes."""

from __future__ import annotations

import functools

import torch

from tlora_megatron.ops.cuda_calls import MAX_TARGETS, GemmTile
from tlora_megatron.ops.factors import SiteFactors
from tlora_megatron.ops.tiling import ROW_TILE

_MAX_COLUMN_TILES = 256
"""`kMaxColumnTiles` of lora_gemm.cu."""


def suits(factors: SiteFactors, weight_NK: torch.Tensor) -> bool:
    """Whether the kernels take a linear: rows of whole 16 bytes, fused columns in 64s."""
    size_out, size_in = weight_NK.shape
    columns = factors.columns
    aligned = size_in % 8 == 0 and size_out % 8 == 0 and factors.first_column % 2 == 0
    fused = all(c.is_whole or not (c.begin % 64 or c.width % 64 or c.stride % 64) for c in columns)
    return aligned and fused and len(columns) <= MAX_TARGETS


@functools.cache
def gemm_tile(num_rows: int, columns: int, clusters: int) -> GemmTile | None:
    """How to cut a GEMM for a GPU of so many clusters; None where the last wave would be too empty.

    Narrow tiles reach 0.9 of the widest's speed (H200, scripts/bench/gemm_times.py); they pay where
    the widest leaves much of the last wave idle.
    """
    speeds = {256: 1.0, 192: 0.93, 128: 0.9}
    row_tiles = -(-num_rows // ROW_TILE)

    def efficiency(width: int) -> float:
        tiles = row_tiles * -(-columns // width)
        used = num_rows * columns / (tiles * ROW_TILE * width)
        return speeds[width] * used * tiles / (-(-tiles // clusters) * clusters)

    allowed = [w for w in speeds if -(-columns // w) <= _MAX_COLUMN_TILES]
    best = max(allowed, key=efficiency, default=256)
    return GemmTile(best) if allowed and efficiency(best) >= 0.8 else None
