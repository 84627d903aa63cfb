"""The multi-adapter linear with Triton kernels for the rank part and cuBLAS for the base.

Launches: forward s, rank part of y, base GEMM; backward dS with dB, rank part of dx, base GEMM, dA.

Here are the rank parts of y and of dx, `s B^T` and `drop(dS A)`, for the base GEMM to add to. A
program owns a block of the output and goes through the adapters whose rows lie in it. Of s and dS
it reads the chunks alone, which lie first in Triton's layout and in the CUDA kernels'.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.dropout_triton import drop_zero, dropped_below, row_hash
from tlora_megatron.ops.lora.linear_ops import BoundLinear, KernelLinear, SiteFactors
from tlora_megatron.ops.lora.rank_places import RankPlaces, cached_places, plan_places
from tlora_megatron.ops.lora.tiling import PlanTensors
from tlora_megatron.ops.lora.triton_parts import (
    CHUNK,
    FIELDS,
    TILE,
    column_mapping,
    gather,
    pairs_of_columns,
    row_keys_or,
)
from tlora_megatron.ops.lora.triton_products import down
from tlora_megatron.ops.lora.triton_sums import backward_down, backward_up
from tlora_megatron.ops.lora.triton_work_items import (
    KernelConfig,
    UpConfig,
    kernel_config,
    up_items,
)
from tlora_megatron.ops.routing import RowGroups
from tlora_megatron.ops.warm_kernel import WarmKernel

_NOTHING, _BIAS, _BASE = 0, 1, 2
"""The base that the rank part is added to."""


@triton.jit
def _add_adapter(
    sums: tl.tensor,
    record: tl.tensor,  # pointer
    rows: tl.tensor,
    ranked: tl.tensor,  # pointer
    weight: tl.tensor,  # pointer
    weight_stride: tl.tensor,
    compact: tl.tensor,
    inside: tl.tensor,
    ROW_FIELD: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Adds one adapter's product in its own rows; what others hold there cannot reach them."""
    mine = (rows >= tl.load(record)) & (rows < tl.load(record + 1))
    chunk = tl.load(record + 3)
    weight += tl.load(record + ROW_FIELD).to(tl.int64) * weight_stride
    rank = tl.arange(0, CHUNK)
    weight_rows = weight + rank.to(tl.int64)[:, None] * weight_stride
    row = tl.multiple_of(tl.load(record + 7), BM)
    ranked += (chunk * CHUNK).to(tl.int64) * TILE + row
    ranked_rows = ranked + (rank * TILE)[:, None] + tl.arange(0, BM)[None, :]
    product = tl.zeros([BM, BLOCK], dtype=tl.float32)
    for i in tl.range(0, tl.load(record + 6) // CHUNK, num_stages=STAGES):
        s = tl.load(ranked_rows + i * CHUNK * TILE)
        pointers = weight_rows + i * (CHUNK * weight_stride) + compact[None, :]
        factor = tl.load(pointers, mask=inside[None, :], other=0.0)
        product = tl.dot(tl.trans(s), factor, product)
    return tl.where(mine[:, None] & inside[None, :], sums + product, sums)


@triton.jit(do_not_specialize=["first_row", "end_row"])
def _up_kernel(
    items: tl.tensor, s: tl.tensor, lora_b: tl.tensor, columns: tl.tensor, base: tl.tensor,
    out: tl.tensor, first_row: tl.tensor, end_row: tl.tensor, NUM_COLUMNS: tl.constexpr,
    TARGETS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    MAPPED: tl.constexpr, ALIGNED: tl.constexpr, ADDS_TO: tl.constexpr,
) -> None:  # fmt: skip
    column0 = tl.program_id(0) * BLOCK
    row_block = first_row // BM + tl.program_id(1)
    header = items + row_block * FIELDS
    rows = row_block * BM + tl.arange(0, BM)
    out_columns = column0 + tl.arange(0, BLOCK)
    sums = tl.zeros([BM, BLOCK], dtype=tl.float32)
    for p in range(TARGETS):
        width = tl.load(columns + 4 * p)
        stride = tl.load(columns + 4 * p + 1)
        first = tl.load(columns + 4 * p + 2)
        size = tl.load(columns + 4 * p + 3)
        weight = tl.load(lora_b + p).to(tl.pointer_type(s.dtype.element_ty))
        if ALIGNED:
            weight = tl.multiple_of(weight, 16)
            size = tl.multiple_of(size, 8)
        begin = tl.load(header + p)
        end = tl.load(header + p + 1)
        compact = out_columns
        inside = out_columns < NUM_COLUMNS
        if MAPPED == 1:
            offset = column0 % stride
            if (offset < first) | (offset >= first + width):
                end = begin
            start = column0 // stride * width + offset - first
            compact = tl.multiple_of(start, 8) + tl.arange(0, BLOCK)
        if MAPPED == 2:
            offsets = out_columns % stride
            inside = inside & (offsets >= first) & (offsets < first + width)
            compact = out_columns // stride * width + offsets - first
        for r in range(begin, end):
            record = items + r * FIELDS
            sums = _add_adapter(
                sums, record, rows, s, weight, size, compact, inside, 4, BM, BLOCK, STAGES
            )
    inside = out_columns < NUM_COLUMNS
    mask = ((rows >= first_row) & (rows < end_row))[:, None] & inside[None, :]
    offsets = (rows - first_row).to(tl.int64)[:, None] * NUM_COLUMNS + out_columns[None, :]
    if ADDS_TO == 1:
        sums += tl.load(base + out_columns, mask=inside, other=0.0)[None, :].to(tl.float32)
    if ADDS_TO == 2:
        sums += tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["dropout_key", "first_column", "first_row", "end_row"])
def _dgrad_kernel(
    items: tl.tensor, ds: tl.tensor, lora_a: tl.tensor, out: tl.tensor, dropout: tl.tensor,
    row_keys: tl.tensor, dropout_key: tl.tensor, first_column: tl.tensor, first_row: tl.tensor,
    end_row: tl.tensor, NUM_COLUMNS: tl.constexpr, TARGETS: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, DROP: tl.constexpr, SCALED: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    column0 = tl.program_id(0) * BLOCK
    row_block = first_row // BM + tl.program_id(1)
    header = items + row_block * FIELDS
    rows = row_block * BM + tl.arange(0, BM)
    out_columns = column0 + tl.arange(0, BLOCK)
    inside = out_columns < NUM_COLUMNS
    sums = tl.zeros([BM, BLOCK], dtype=tl.float32)
    p = tl.zeros([BM], dtype=tl.float32)
    for r in range(tl.load(header), tl.load(header + TARGETS)):
        record = items + r * FIELDS
        sums = _add_adapter(
            sums, record, rows, ds, lora_a, NUM_COLUMNS, out_columns, inside, 5, BM, BLOCK, STAGES
        )
        if DROP:
            mine = (rows >= tl.load(record)) & (rows < tl.load(record + 1))
            p = tl.where(mine, tl.load(dropout + tl.load(record + 2)), p)
    live = (rows >= first_row) & (rows < end_row)
    if DROP and not SCALED:
        sums = sums * (1.0 / (1.0 - p))[:, None]
    values = sums.to(out.dtype.element_ty)
    if DROP:
        hash_M = row_hash(row_keys, rows, live, dropout_key)[:, None]
        columns = (first_column + out_columns)[None, :]
        values = drop_zero(values, hash_M, columns, dropped_below(p)[:, None], PAIRS)
    offsets = (rows - first_row).to(tl.int64)[:, None] * NUM_COLUMNS + out_columns[None, :]
    tl.store(out + offsets, values, mask=live[:, None] & inside[None, :])


_up = WarmKernel(_up_kernel)
_dgrad = WarmKernel(_dgrad_kernel)


def _items(plan: PlanTensors, block_rows: int) -> Tensor:
    return plan.work_items(("up", block_rows), lambda p: up_items(p, block_rows)).items


def up(
    s: Tensor, bias_N: Tensor | None, num_columns: int, linear: KernelLinear, config: UpConfig
) -> Tensor:
    """Returns `b + s B^T`, `[T, N]`, 0 where no adapter has rows or columns."""
    num_rows = linear.plan.num_rows
    out_TN = s.new_empty(num_rows, num_columns)
    base, adds_to = (s, _NOTHING) if bias_N is None else (bias_N, _BIAS)
    _launch_up(s, base, adds_to, out_TN, (0, num_rows), linear, config)
    return out_TN


def up_onto(
    s: Tensor, base_WN: Tensor, window: tuple[int, int], linear: KernelLinear, config: UpConfig
) -> Tensor:
    """Returns `base + s B^T` of the rows `window[0]:window[1]`, in the dtype of the base."""
    if not linear.plan.num_chunks:
        return base_WN.clone()
    out_WN = torch.empty_like(base_WN)
    _launch_up(s, base_WN, _BASE, out_WN, window, linear, config)
    return out_WN


def _launch_up(
    s: Tensor,
    base: Tensor,
    adds_to: int,
    out_WN: Tensor,
    window: tuple[int, int],
    linear: KernelLinear,
    config: UpConfig,
) -> None:
    tables, targets, num_columns = linear.tables, linear.factors.columns, out_WN.shape[1]
    items = _items(linear.plan, config.block_rows)
    _up.launch(
        -(-num_columns // config.block_columns),
        (items, s, tables.lora_b, tables.columns, base, out_WN),
        window,
        (
            num_columns,
            len(targets),
            config.block_rows,
            config.block_columns,
            config.num_stages,
            column_mapping(targets, config.block_columns),
            tables.aligned_lora_b,
            adds_to,
        ),
        num_warps=config.num_warps,
        grid_y=_row_blocks(window, config.block_rows),
    )


def _row_blocks(window: tuple[int, int], block_rows: int) -> int:
    """Blocks of rows that a window touches; one that holds no row takes none."""
    begin, end = window
    return -(-end // block_rows) - begin // block_rows if end > begin else 0


def up_dropped(
    ds: Tensor,
    window: tuple[int, int],
    linear: KernelLinear,
    config: UpConfig,
    *,
    scaled: bool = False,
) -> Tensor:
    """Returns `drop(dS A)` of the rows `window[0]:window[1]`, `[W, K]`, 0 in those without adapter.

    Args:
        scaled: dS holds dropout's `1 / (1 - p)`, as the CUDA kernels' does.
    """
    factors, depth = linear.factors, linear.factors.size_in
    if not linear.plan.num_chunks:
        return ds.new_zeros(window[1] - window[0], depth)
    out_WK = ds.new_empty(window[1] - window[0], depth)
    drop = factors.uses_dropout(linear.rows)
    items = _items(linear.plan, config.block_rows)
    keys = row_keys_or(linear.rows, drop, items)
    _dgrad.launch(
        -(-depth // config.block_columns),
        (items, ds, factors.lora_a, out_WK, factors.dropout, keys),
        (factors.dropout_key, factors.first_column, *window),
        (
            depth,
            factors.layout.num_targets,
            config.block_rows,
            config.block_columns,
            config.num_stages,
            drop,
            scaled,
            pairs_of_columns(ds, factors.first_column),
        ),
        num_warps=config.num_warps,
        grid_y=_row_blocks(window, config.block_rows),
    )
    return out_WK


class TritonOps:
    """`LinearOps` in fp16 or bf16 on any GPU that Triton knows.

    Args:
        config: blocks; None = those for the run's budget of rows.
    """

    name = "triton"

    def __init__(self, *, config: KernelConfig | None = None) -> None:
        self._config = config

    def bind(self, factors: SiteFactors, rows: RowGroups) -> TritonLinear:
        """Returns the linear of these factors over these rows."""
        config = self._config or kernel_config(rows.row_budget)
        return TritonLinear(factors, rows, config)


class TritonLinear(KernelLinear):
    """`BoundLinear` with Triton kernels; see there for what the methods return."""

    __slots__ = ("config",)

    def __init__(self, factors: SiteFactors, rows: RowGroups, config: KernelConfig) -> None:
        super().__init__(factors, rows)
        self.config = config

    def down(self, x_TK: Tensor, window: tuple[int, int] | None = None) -> Tensor:
        return down(x_TK, self, self.config.down, window)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, s: Tensor) -> Tensor:
        if not self.plan.num_chunks and self.rows.exactness is None:
            return F.linear(x_TK, weight_NK, bias_N)
        y_TN = up(s, bias_N, len(weight_NK), self, self.config.up)
        # The base GEMM adds onto the rank part: a pass over [T, N] less than the reverse.
        return y_TN.addmm_(x_TK, weight_NK.t())

    def rank_part(self, s: Tensor, bias_N: Tensor | None, num_columns: int) -> Tensor:
        return up(s, bias_N, num_columns, self, self.config.up)

    def up(self, s: Tensor, base_WN: Tensor, window: tuple[int, int]) -> Tensor:
        return up_onto(s, base_WN.contiguous(), window, self, self.config.up)

    def branch_dgrad(self, ds: Tensor, window: tuple[int, int]) -> Tensor:
        return up_dropped(ds, window, self, self.config.up)

    def rank_places(self, parts: int = 1) -> RankPlaces:
        """Returns places in row form, and in chunks."""
        rows, plan = self.rows, self.plan
        build = functools.partial(plan_places, rows, plan)
        return cached_places(rows, plan.layout, parts, plan.device, "triton", build, gather)

    def backward_up(self, dy_TN: Tensor, s: Tensor) -> Tensor:
        """Accumulates dB and returns dS."""
        return backward_up(dy_TN, s, self, self.config.backward_up)

    def dgrad(self, dy_TN: Tensor, ds: Tensor, weight_NK: Tensor) -> Tensor:
        if not len(ds) and self.rows.exactness is None:
            return dy_TN @ weight_NK
        return self.branch_dgrad(ds, (0, len(dy_TN))).addmm_(dy_TN, weight_NK)

    def backward_down(
        self,
        x_TK: Tensor,
        dy_TN: Tensor,
        s: Tensor,
        ds: Tensor,
        window: tuple[int, int],
        up: BoundLinear | None = None,
    ) -> None:
        """Accumulates dA; `backward_up` has accumulated dB."""
        backward_down(x_TK, ds, window, self, self.config.backward_down)
