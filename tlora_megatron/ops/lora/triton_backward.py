"""dS and dB of all adapters at one linear in one launch, from one pass of dy through memory.

dS is a rank product like s, dB a sum over rows like dA (`triton.sums`). Their programs stand in
turns, region by region of dy, so that L2 serves the second read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.lora.linear_ops import KernelLinear
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, BackwardUpConfig
from tlora_megatron.ops.lora.triton_parts import (
    CHUNK,
    FIELDS,
    TILE,
    column_mapping,
    finish_block,
    largest_rank_tile,
    new_ranked,
    new_workspace,
    rank_product,
)
from tlora_megatron.ops.lora.triton_sums import outer_block
from tlora_megatron.ops.lora.triton_work_items import (
    RANK_PRODUCT,
    backward_up_bounds,
    backward_up_items,
)

_RANK_PRODUCT = tl.constexpr(RANK_PRODUCT)


@triton.jit
def _ds_block(
    item: tl.tensor,  # pointer
    dy: tl.tensor,  # pointer
    dy_stride: tl.tensor,
    lora_b: tl.tensor,  # pointer to addresses
    ds: tl.tensor,  # pointer
    row_form: tl.tensor,
    chunks: tl.tensor,  # pointer
    columns: tl.tensor,  # pointer
    workspace: tl.tensor,  # pointer
    counters: tl.tensor,  # pointer
    scaling: tl.tensor,  # pointer
    BM: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    rows = tl.load(item) + tl.arange(0, BM)
    live = (rows >= tl.load(item + 1)) & (rows < tl.load(item + 2))
    num_rank = tl.multiple_of(tl.load(item + 4), CHUNK)
    target = tl.load(item + 14)
    scale = tl.load(scaling + tl.load(item + 5))
    depth0 = tl.multiple_of(tl.load(item + 8), BLOCK)
    depth1 = tl.load(item + 9)
    columns += target * 4
    stride = tl.load(columns + 3)
    weight = tl.load(lora_b + target).to(tl.pointer_type(dy.dtype.element_ty))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        stride = tl.multiple_of(stride, 8)
    weight += tl.load(item + 3).to(tl.int64) * stride
    sums = rank_product(
        dy,
        dy_stride,
        rows,
        live,
        weight,
        stride,
        num_rank,
        depth0,
        depth1,
        tl.load(columns),
        tl.load(columns + 1),
        tl.load(columns + 2),
        rows[:, None].to(tl.uint32),
        target.to(tl.uint32),
        0,
        R,
        BLOCK,
        STAGES,
        EVEN,
        MAPPED,
        False,
        False,
    )
    finish_block(
        sums, item, live, scale, ds, row_form, chunks, workspace, counters, num_rank, BM, R, True
    )


@triton.jit(do_not_specialize=["row_form"])
def _backward_up_kernel(
    items: tl.tensor,
    dy: tl.tensor,
    dy_stride: tl.tensor,
    s: tl.tensor,
    ds: tl.tensor,
    row_form: tl.tensor,
    lora_b: tl.tensor,
    gradients: tl.tensor,
    columns: tl.tensor,
    borders: tl.tensor,
    chunks: tl.tensor,
    workspace: tl.tensor,
    counters: tl.tensor,
    scaling: tl.tensor,
    BM: tl.constexpr,
    MAX_R: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED_B: tl.constexpr,
    ALIGNED_GRAD: tl.constexpr,
) -> None:
    item = items + tl.program_id(0) * FIELDS
    num_rank = tl.load(item + 4)
    kind = tl.load(item + 15)
    for EXPONENT in tl.static_range(4, 9):
        if 2**EXPONENT <= MAX_R:
            above = num_rank > (0 if EXPONENT == 4 else 2**EXPONENT // 2)
            if above & (num_rank <= 2**EXPONENT):
                if kind == _RANK_PRODUCT:
                    _ds_block(
                        item,
                        dy,
                        dy_stride,
                        lora_b,
                        ds,
                        row_form,
                        chunks,
                        columns,
                        workspace,
                        counters,
                        scaling,
                        BM,
                        2**EXPONENT,
                        DEPTH,
                        STAGES,
                        EVEN,
                        MAPPED,
                        ALIGNED_B,
                    )
                else:
                    target = tl.load(item + 14)
                    outer_block(
                        item,
                        dy,
                        dy_stride,
                        0,
                        s + row_form.to(tl.int64) * TILE,
                        gradients,
                        columns + target * 4,
                        borders,
                        workspace,
                        counters,
                        scaling,
                        chunks,
                        0,
                        0,
                        2**EXPONENT,
                        BLOCK,
                        STEP,
                        STAGES,
                        EVEN,
                        MAPPED,
                        ALIGNED_GRAD,
                        False,
                        False,
                    )


def backward_up(dy_TN: Tensor, s: Tensor, linear: KernelLinear, config: BackwardUpConfig) -> Tensor:
    """Accumulates dB and returns dS, `[PlanTensors.ranked_rows, ROW_TILE]` in the dtype of dy."""
    factors, tables, plan = linear.factors, linear.tables, linear.plan
    sizes = tuple(c.size for c in factors.columns)
    items = plan.work_items(
        ("backward_up", config, sizes),
        lambda p: backward_up_items(p, config, sizes),
        lambda p: backward_up_bounds(p, config, sizes),
    )
    ds = new_ranked(dy_TN, plan)
    if not items.count:
        return ds
    widest = max(config.block_columns, config.block_depth)
    _backward_up_kernel[(items.count,)](
        items.items,
        dy_TN,
        dy_TN.stride(0),
        s,
        ds,
        plan.num_chunks * RANK_CHUNK,
        tables.lora_b,
        tables.grad_b,
        tables.columns,
        items.borders,
        plan["chunks"],
        new_workspace(items, dy_TN.device),
        items.counters,
        factors.scaling,
        BM=config.block_rows,
        MAX_R=largest_rank_tile(plan.most_target_chunks, config.rank_tile),
        DEPTH=config.block_depth,
        BLOCK=config.block_columns,
        STEP=config.step_rows,
        STAGES=config.num_stages,
        EVEN=all(size % widest == 0 for size in sizes),
        MAPPED=column_mapping(factors.columns, widest),
        ALIGNED_B=tables.aligned_lora_b,
        ALIGNED_GRAD=tables.aligned_b,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return ds
