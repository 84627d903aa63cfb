"""What the CUDA kernels are given of a linear's factors and a micro-batch's plan.

s and dS are one flat tensor: the transposed chunks that the GEMM reads, then rows `[T, R]`, which
the sums over rows read.
"""

from __future__ import annotations

import torch

from tlora_megatron.ops.cuda_calls import Dropout, RankPart
from tlora_megatron.ops.cuda_row_items import rank_columns
from tlora_megatron.ops.cuda_sum_items import DOWN, UP, SumInput, rows_per_run
from tlora_megatron.ops.factors import SiteFactors
from tlora_megatron.ops.plan_tensors import PlanTensors
from tlora_megatron.ops.row_groups import RowGroups
from tlora_megatron.ops.tiling import RANK_CHUNK, ROW_TILE
from tlora_megatron.ops.triton_down import uses_dropout


def new_rank_rows(
    like: torch.Tensor, plan: PlanTensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An empty flat s or dS and its two parts."""
    columns = rank_columns(plan.layout)
    flat = like.new_empty(plan.num_chunks * RANK_CHUNK * ROW_TILE + plan.num_rows * columns)
    return flat, *split_rank_rows(flat, plan)


def split_rank_rows(flat: torch.Tensor, plan: PlanTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks `[C * 16, 256]` and the rows `[T, R]` of a flat s or dS."""
    ext, rows = flat.split(
        [plan.num_chunks * RANK_CHUNK * ROW_TILE, plan.num_rows * rank_columns(plan.layout)]
    )
    return ext.view(-1, ROW_TILE), rows.view(plan.num_rows, -1)


def is_flat(s: torch.Tensor) -> bool:
    """Whether s or dS is of these kernels; Triton's have two dimensions."""
    return s.dim() == 1


def dropout_of(factors: SiteFactors, rows: RowGroups, plan: PlanTensors) -> Dropout | None:
    """What the mask follows from; None where nothing is dropped."""
    if not uses_dropout(factors, rows):
        return None
    return Dropout(
        probability=factors.dropout,
        row_keys=rows.row_keys(plan.device),
        row_slots=plan["row_slots"],
        key=factors.dropout_key,
        first_column=factors.first_column,
    )


def sum_inputs(
    x_TK: torch.Tensor,
    dy_TN: torch.Tensor,
    factors: SiteFactors,
    rows: RowGroups,
    window: tuple[int, int],
    blocks: int,
) -> tuple[SumInput, SumInput]:
    """x over a window of rows and dy over all, as the sums that make dA and dB read them.

    Args:
        blocks: multiprocessors of the GPU.
    """
    features = sum(c.size for c in factors.columns)
    down = SumInput(
        kind=DOWN,
        columns=(),
        in_columns=x_TK.shape[1],
        rows_per_run=rows_per_run(rows.row_budget, x_TK.shape[1], blocks),
        window=window,
    )
    up = SumInput(
        kind=UP,
        columns=factors.columns,
        in_columns=dy_TN.shape[1],
        rows_per_run=rows_per_run(rows.row_budget, features, blocks),
        window=(0, len(dy_TN)),
    )
    return down, up


def forward_part(ext: torch.Tensor, factors: SiteFactors, plan: PlanTensors) -> RankPart | None:
    """What y adds to the base: s B^T; None where no row has an adapter."""
    if not plan.num_chunks:
        return None
    return RankPart(
        ext=ext,
        factors=factors.lora_b,
        columns=factors.columns,
        num_targets=len(factors.lora_b),
        tile_chunks=plan["tile_chunks"],
        chunk_rows=plan["chunk_b"],
        dropout=None,
    )


def dgrad_part(
    ext: torch.Tensor, factors: SiteFactors, plan: PlanTensors, dropout: Dropout | None
) -> RankPart | None:
    """What dx adds to the base: drop(dS A); None where no row has an adapter."""
    if not plan.num_chunks:
        return None
    return RankPart(
        ext=ext,
        factors=(factors.lora_a,),
        columns=(),
        num_targets=len(factors.lora_b),
        tile_chunks=plan["tile_chunks"],
        chunk_rows=plan["chunk_a"],
        dropout=dropout,
    )
