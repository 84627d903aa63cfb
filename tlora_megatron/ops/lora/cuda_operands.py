"""Operands of the CUDA kernels besides activations, and the linears that they support."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tlora_megatron.ops.dropout import SEED_COLUMNS
from tlora_megatron.ops.lora.cuda_arguments import MAX_TARGETS
from tlora_megatron.ops.lora.cuda_calls import Arenas, GemmTile
from tlora_megatron.ops.lora.cuda_work_items import (
    DOWN,
    UP,
    SumInput,
    rows_per_run,
    sum_bounds,
    sum_items,
)
from tlora_megatron.ops.lora.linear_ops import OutputColumns, SiteFactors
from tlora_megatron.ops.lora.plan_tensors import PlanTensors, WorkItems
from tlora_megatron.ops.lora.tiling import ROW_TILE

_SPEEDS = ((256, 1.0), (192, 0.93), (128, 0.9))
"""Widths of tiles and the share of the widest's speed that each reaches (H200, gemm_times of
docs/measurements)."""
_MAX_COLUMNS = 256 * 256
"""`kMaxColumnTiles` of gemm_tiles.cuh, all of the widest."""


@dataclass(frozen=True, eq=False)
class SumSizes:
    """The sizes of a linear that decide the work of rank_sums.cu, besides a plan.

    There is one object for equal sizes: a work list is found by its address, whichever of the
    model's linears asks.
    """

    columns: tuple[OutputColumns, ...]
    in_columns: int
    out_columns: int


sum_sizes = functools.cache(SumSizes)


def sum_inputs(
    sizes: SumSizes,
    row_budget: int,
    num_rows: int,
    window: tuple[int, int],
    blocks: int,
    kinds: tuple[int, ...],
) -> tuple[SumInput, ...]:
    """Returns x over a window of rows and dy over all rows, as the sums of dA and dB read them."""
    down = SumInput(
        kind=DOWN,
        columns=(),
        in_columns=sizes.in_columns,
        rows_per_run=rows_per_run(row_budget, sizes.in_columns, blocks),
        window=window,
    )
    up = SumInput(
        kind=UP,
        columns=sizes.columns,
        in_columns=sizes.out_columns,
        # Of all outputs: which of them have adapters follows from a job's neighbours.
        rows_per_run=rows_per_run(row_budget, sizes.out_columns, blocks),
        window=(0, num_rows),
    )
    return tuple(each for each in (down, up) if each.kind in kinds)


def sums_of(
    plan: PlanTensors,
    sizes: SumSizes,
    row_budget: int,
    window: tuple[int, int],
    blocks: int,
    kinds: tuple[int, ...] = (DOWN, UP),
) -> WorkItems:
    """Returns the work of rank_sums.cu in a micro-batch, over x's rows of a window.

    Args:
        blocks: multiprocessors of the GPU.
        kinds: which sums: of x, of dy or of both.
    """
    inputs = functools.partial(sum_inputs, sizes, row_budget, plan.num_rows, window, blocks, kinds)
    return plan.work_items(
        (sizes, window, blocks, kinds),
        lambda plan: sum_items(plan, inputs()),
        lambda plan: sum_bounds(plan, inputs()),
    )


class CudaSite:
    """Operands that all launches of one linear share: `factors.cached(CudaSite)`.

    They hold as long as the factors stay where they are.
    """

    def __init__(self, factors: SiteFactors) -> None:
        self.is_supported = is_supported(factors)
        """True if these kernels can compute the linear; if not, ask for nothing below."""
        self.sizes = sum_sizes(factors.columns, factors.size_in, factors.size_out)
        self._lora_a, self._lora_b, self._columns = factors.lora_a, factors.lora_b, factors.columns

    @functools.cached_property
    def a(self) -> Arenas:
        """The arena of `lora_a`."""
        return Arenas((self._lora_a,), ())

    @functools.cached_property
    def b(self) -> Arenas:
        """The arenas of `lora_b`."""
        return Arenas(self._lora_b, self._columns)


def is_supported(factors: SiteFactors) -> bool:
    """Returns True if the kernels can compute a linear, whatever the micro-batch.

    Beside its sizes they need gradients at 16 bytes: bulk copies fault elsewhere, and an odd size
    of one linear shifts others' gradients in the slabs.
    """
    sizes = (factors.size_in, factors.size_out)
    return factors.is_aligned and not why_not_sizes(factors.columns, *sizes, factors.first_column)


def why_not_sizes(
    columns: Sequence[OutputColumns], size_in: int, size_out: int, first_column: int
) -> str | None:
    """Returns why the kernels cannot compute linears of such sizes; None if they can.

    They need rows of whole 16 bytes, fused columns in 64s, and shards of x that begin where a block
    of the dropout mask does.
    """
    if not fit_gemm(size_in, size_out):
        return f"sizes must be multiples of 8, up to {_MAX_COLUMNS}, got {size_in} and {size_out}"
    if first_column % SEED_COLUMNS:
        return f"shards of the input must have multiples of {SEED_COLUMNS} features"
    if any(not c.is_whole and (c.begin % 64 or c.width % 64 or c.stride % 64) for c in columns):
        return "fused outputs must come in multiples of 64 features"
    if len(columns) > MAX_TARGETS:
        return f"targets must be at most {MAX_TARGETS}, got {len(columns)}"
    return None


def fit_gemm(*sizes: int) -> bool:
    """True if the GEMM takes a weight of these sizes."""
    return not any(size % 8 or size > _MAX_COLUMNS for size in sizes)


@functools.cache
def gemm_tile(
    row_budget: int, columns: int, clusters: int, speeds: tuple[tuple[int, float], ...] = _SPEEDS
) -> GemmTile:
    """Returns how a GEMM is divided into tiles on a GPU of so many clusters.

    Narrow tiles pay where the widest leaves much of the last wave idle.

    Args:
        row_budget: `RowGroups.row_budget`.
        speeds: widths of tiles, and the share of the widest's speed that each reaches.
    """
    row_tiles = -(-row_budget // ROW_TILE)

    def efficiency(pair: tuple[int, float]) -> float:
        width, speed = pair
        tiles = row_tiles * -(-columns // width)
        used = row_budget * columns / (tiles * ROW_TILE * width)
        return speed * used * tiles / (-(-tiles // clusters) * clusters)

    allowed = [pair for pair in speeds if columns * 256 <= _MAX_COLUMNS * pair[0]]
    return GemmTile(max(allowed, key=efficiency)[0])
