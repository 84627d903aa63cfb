"""The multi-adapter linear with Triton kernels for the rank part and cuBLAS for the base.

Launches: forward s, rank part of y, base GEMM; backward dS with dB, rank part of dx, base GEMM, dA.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.dropout_triton import dropped_below, row_hash
from tlora_megatron.ops.lora.linear_ops import BoundLinear, KernelLinear, SiteFactors
from tlora_megatron.ops.lora.rank_places import RankPlaces, cached_places, plan_places
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, DownConfig, KernelConfig, kernel_config
from tlora_megatron.ops.lora.triton_backward import backward_up
from tlora_megatron.ops.lora.triton_parts import (
    CHUNK,
    FIELDS,
    finish_block,
    gather,
    largest_rank_tile,
    new_ranked,
    new_workspace,
    pairs_of_columns,
    rank_product,
    row_keys_or,
)
from tlora_megatron.ops.lora.triton_sums import backward_down
from tlora_megatron.ops.lora.triton_up import up, up_dropped, up_onto
from tlora_megatron.ops.lora.triton_work_items import down_bounds, down_items
from tlora_megatron.ops.row_groups import RowGroups


@triton.jit
def _down_block(
    item: tl.tensor,  # pointer
    x: tl.tensor,  # pointer
    first_row: tl.tensor,
    x_stride: tl.tensor,
    lora_a: tl.tensor,  # pointer
    s: tl.tensor,  # pointer
    row_form: tl.tensor,
    chunks: tl.tensor,  # pointer
    workspace: tl.tensor,  # pointer
    counters: tl.tensor,  # pointer
    scaling: tl.tensor,  # pointer
    dropout: tl.tensor,  # pointer
    row_keys: tl.tensor,  # pointer
    dropout_key: tl.tensor,
    first_column: tl.tensor,
    depth: tl.tensor,
    BM: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    DROP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    rows = tl.load(item) + tl.arange(0, BM)
    live = (rows >= tl.load(item + 1)) & (rows < tl.load(item + 2))
    num_rank = tl.multiple_of(tl.load(item + 4), CHUNK)
    slot = tl.load(item + 5)
    depth0 = tl.multiple_of(tl.load(item + 8), BLOCK)
    depth1 = tl.load(item + 9)
    scale = tl.load(scaling + slot)
    hash_M = rows[:, None].to(tl.uint32)
    below = slot.to(tl.uint32)
    if DROP:
        p = tl.load(dropout + slot)
        scale = scale * (1.0 / (1.0 - p))
        below = dropped_below(p)
        hash_M = row_hash(row_keys, rows, live, dropout_key)[:, None]
    sums = rank_product(
        x,
        x_stride,
        rows - first_row,
        live,
        lora_a + tl.load(item + 3).to(tl.int64) * depth,
        depth,
        num_rank,
        depth0,
        depth1,
        1,
        1,
        0,
        hash_M,
        below,
        first_column,
        R,
        BLOCK,
        STAGES,
        EVEN,
        0,
        DROP,
        PAIRS,
    )
    finish_block(
        sums, item, live, scale, s, row_form, chunks, workspace, counters, num_rank, BM, R, SPLIT
    )


@triton.jit(do_not_specialize=["first_row", "row_form", "dropout_key", "first_column"])
def _down_kernel(
    items: tl.tensor,
    x: tl.tensor,
    first_row: tl.tensor,
    x_stride: tl.tensor,
    lora_a: tl.tensor,
    s: tl.tensor,
    row_form: tl.tensor,
    chunks: tl.tensor,
    workspace: tl.tensor,
    counters: tl.tensor,
    scaling: tl.tensor,
    dropout: tl.tensor,
    row_keys: tl.tensor,
    dropout_key: tl.tensor,
    first_column: tl.tensor,
    depth: tl.tensor,
    BM: tl.constexpr,
    MAX_R: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    DROP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    item = items + tl.program_id(0) * FIELDS
    num_rank = tl.load(item + 4)
    # A rank-4 adapter does the work of a rank-16 one, whoever stands beside it.
    for EXPONENT in tl.static_range(4, 9):
        if 2**EXPONENT <= MAX_R:
            above = num_rank > (0 if EXPONENT == 4 else 2**EXPONENT // 2)
            if above & (num_rank <= 2**EXPONENT):
                _down_block(
                    item,
                    x,
                    first_row,
                    x_stride,
                    lora_a,
                    s,
                    row_form,
                    chunks,
                    workspace,
                    counters,
                    scaling,
                    dropout,
                    row_keys,
                    dropout_key,
                    first_column,
                    depth,
                    BM,
                    2**EXPONENT,
                    BLOCK,
                    STAGES,
                    EVEN,
                    SPLIT,
                    DROP,
                    PAIRS,
                )


def down(
    x_TK: Tensor, linear: KernelLinear, config: DownConfig, window: tuple[int, int] | None = None
) -> Tensor:
    """Returns s, `[PlanTensors.ranked_rows, ROW_TILE]` in the dtype of x."""
    factors, plan, depth = linear.factors, linear.plan, x_TK.shape[1]
    items = plan.work_items(
        ("down", config, depth, window),
        lambda p: down_items(p, config, depth, window),
        lambda p: down_bounds(p, config, depth),
    )
    s = new_ranked(x_TK, plan)
    if window is not None:
        s.zero_()
    if not items.count:
        return s
    drop = factors.uses_dropout(linear.rows)
    rank_tile = largest_rank_tile(plan.most_chunks, config.rank_tile)
    num_stages = config.num_stages if rank_tile <= 64 else max(config.num_stages - 1, 1)
    _down_kernel[(items.count,)](
        items.items,
        x_TK,
        0 if window is None else window[0],
        x_TK.stride(0),
        factors.lora_a,
        s,
        plan.num_chunks * RANK_CHUNK,
        plan["chunks"],
        new_workspace(items, x_TK.device),
        items.counters,
        factors.scaling,
        factors.dropout,
        row_keys_or(linear.rows, drop, plan["chunks"]),
        factors.dropout_key,
        factors.first_column,
        depth,
        BM=config.block_rows,
        MAX_R=rank_tile,
        BLOCK=config.block_depth,
        STAGES=num_stages,
        EVEN=depth % config.block_depth == 0,
        SPLIT=config.splits > 1,
        DROP=drop,
        PAIRS=pairs_of_columns(x_TK, factors.first_column),
        num_warps=config.num_warps,
        num_stages=num_stages,
    )
    return s


class TritonOps:
    """`LinearOps` in fp16 or bf16 on any GPU that Triton knows.

    Args:
        graph_safe: tables, buffers and grids by capacity, so that `plan_tensors.update_plans` can
            change the segments of a captured graph.
        config: blocks; None = those for the run's budget of rows.
    """

    name = "triton"

    def __init__(self, *, graph_safe: bool = False, config: KernelConfig | None = None) -> None:
        self._graph_safe = graph_safe
        self._config = config

    def bind(self, factors: SiteFactors, rows: RowGroups) -> TritonLinear:
        """Returns the linear of these factors over these rows."""
        config = self._config or kernel_config(rows.row_budget)
        return TritonLinear(factors, rows, config, graph_safe=self._graph_safe)


class TritonLinear(KernelLinear):
    """`BoundLinear` with Triton kernels; see there for what the methods return."""

    __slots__ = ("config",)

    def __init__(
        self, factors: SiteFactors, rows: RowGroups, config: KernelConfig, *, graph_safe: bool
    ) -> None:
        super().__init__(factors, rows, graph_safe=graph_safe)
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
        build = plan_places(rows, plan)
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
