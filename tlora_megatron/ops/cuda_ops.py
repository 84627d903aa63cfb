"""`LinearOps` with the CUDA kernels of `csrc/`, for Hopper GPUs.

Launches: forward s and the rank-extended GEMM; backward dS, the GEMM again, dA with dB. Linears
that the kernels do not take (sizes that are no multiple of 8, fused outputs that are not laid out
in 64s) go through Triton.

What decides an order of summation (tiles, runs, parts) follows from the run's budget of rows and
the linear's sizes, so that a job's bits do not depend on what else is packed. For the same reason
no GEMM here is cuBLAS's, which chooses by the number of rows.
"""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import torch

from tlora_megatron.ops.cuda_calls import (
    Dropout,
    GemmTile,
    gemm,
    multiprocessors,
    rank_rows,
    rank_sums,
)
from tlora_megatron.ops.cuda_fit import gemm_tile, suits
from tlora_megatron.ops.cuda_operands import (
    dgrad_part,
    dropout_of,
    forward_part,
    is_flat,
    new_rank_rows,
    split_rank_rows,
    sum_inputs,
)
from tlora_megatron.ops.cuda_row_items import row_bounds, row_items, row_parts
from tlora_megatron.ops.cuda_sum_items import sum_bounds, sum_items
from tlora_megatron.ops.factors import SiteFactors
from tlora_megatron.ops.plan_tensors import WORKSPACE_UNIT, PlanTensors, WorkItems
from tlora_megatron.ops.row_groups import RowGroups
from tlora_megatron.ops.triton_ops import TritonOps

_BLOCKS = 2
"""Blocks of the rank-sized kernels that a multiprocessor holds."""


class CudaOps(TritonOps):
    """The multi-adapter linear in fp16 or bf16 on a Hopper GPU; see `LinearOps` and `TritonOps`."""

    name = "cuda"

    def forward(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns y `[T, N]` and s."""
        plan, tables = self.plan(factors, rows), self.tables[factors]
        # Another linear's odd size may shift this one's gradients in the slabs: bulk copies fault.
        aligned = tables.aligned_a and tables.aligned_b
        if not aligned or not suits(factors, weight_NK):
            return super().forward(x_TK, weight_NK, bias_N, factors, rows)
        x_TK, weight_NK = x_TK.contiguous(), weight_NK.contiguous()
        s, ext, s_TR = new_rank_rows(x_TK, plan)
        items = plan.work_items(
            "cuda s",
            functools.partial(row_items, per_target=False),
            functools.partial(row_bounds, per_target=False),
        )
        dropout = dropout_of(factors, rows, plan)
        parts = _row_parts(rows, x_TK.device)
        _rank_rows(x_TK, ext, s_TR, items, factors, plan, parts, dropout, masked=True)
        tile = _gemm_tile(rows, len(weight_NK), x_TK.device)
        y_TN = x_TK.new_empty(len(x_TK), len(weight_NK))
        rank = forward_part(ext, factors, plan)
        gemm(x_TK, weight_NK, y_TN, tile, transposed=True, early=True, bias_N=bias_N, rank=rank)
        return y_TN, s

    def backward_up(
        self, dy_TN: torch.Tensor, s: torch.Tensor, factors: SiteFactors, rows: RowGroups
    ) -> torch.Tensor:
        """Returns dS, with the `1 / (1 - p)` of dropout: masks are all that its readers apply."""
        plan = self.plan(factors, rows)
        if not is_flat(s):
            return super().backward_up(dy_TN, s, factors, rows)
        dy_TN = dy_TN.contiguous()
        ds, ext, ds_TR = new_rank_rows(dy_TN, plan)
        items = plan.work_items(
            "cuda ds",
            functools.partial(row_items, per_target=True),
            functools.partial(row_bounds, per_target=True),
        )
        parts, dropout = _row_parts(rows, dy_TN.device), dropout_of(factors, rows, plan)
        _rank_rows(dy_TN, ext, ds_TR, items, factors, plan, parts, dropout, masked=False)
        return ds

    def dgrad(
        self,
        dy_TN: torch.Tensor,
        ds: torch.Tensor,
        weight_NK: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> torch.Tensor:
        """Returns dx `[T, K]`."""
        if not is_flat(ds):
            return super().dgrad(dy_TN, ds, weight_NK, factors, rows)
        plan = self.plan(factors, rows)
        # Copies made here would be the previous kernel's work.
        early = dy_TN.is_contiguous() and weight_NK.is_contiguous()
        dy_TN, weight_NK = dy_TN.contiguous(), weight_NK.contiguous()
        ext, _ = split_rank_rows(ds, plan)
        tile = _gemm_tile(rows, weight_NK.shape[1], dy_TN.device)
        dx_TK = dy_TN.new_empty(len(dy_TN), weight_NK.shape[1])
        rank = dgrad_part(ext, factors, plan, dropout_of(factors, rows, plan))
        gemm(dy_TN, weight_NK, dx_TK, tile, transposed=False, early=early, rank=rank)
        return dx_TK

    def backward_down(
        self,
        x_TK: torch.Tensor,
        dy_TN: torch.Tensor,
        s: torch.Tensor,
        ds: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
        window: tuple[int, int],
    ) -> None:
        """Accumulates dA over the rows of a window, which are all that x holds, and dB over all."""
        if not is_flat(ds):
            return super().backward_down(x_TK, dy_TN, s, ds, factors, rows, window)
        plan, tables = self.plan(factors, rows), self.tables[factors]
        inputs = sum_inputs(x_TK, dy_TN, factors, rows, window, multiprocessors(dy_TN.device))
        items = plan.work_items(
            ("cuda sums", inputs),
            functools.partial(sum_items, inputs=inputs),
            functools.partial(sum_bounds, inputs=inputs),
        )
        if not items.count:
            return None
        (_, s_TR), (_, ds_TR) = split_rank_rows(s, plan), split_rank_rows(ds, plan)
        rank_sums(
            x_TK.contiguous(),
            ds_TR,
            dy_TN.contiguous(),
            s_TR,
            items=items.items,
            num_items=items.count,
            blocks=min(items.count, _BLOCKS * multiprocessors(dy_TN.device)),
            grad_a=tables.grad_a,
            grad_b=tables.grad_b,
            workspace=_workspace(items, dy_TN.device),
            counters=items.counters,
            first_row=window[0],
            # dS was computed since dy and s were written. A copy made here is not.
            early=dy_TN.is_contiguous(),
            dropout=dropout_of(factors, rows, plan),
        )
        return None


def _row_parts(rows: RowGroups, device: torch.device) -> int:
    return row_parts(rows.row_budget, multiprocessors(device))


def _gemm_tile(rows: RowGroups, columns: int, device: torch.device) -> GemmTile:
    return gemm_tile(rows.row_budget, columns, multiprocessors(device) // 2)


def _rank_rows(
    in_TK: torch.Tensor,
    ext: torch.Tensor,
    rows_TR: torch.Tensor,
    items: WorkItems,
    factors: SiteFactors,
    plan: PlanTensors,
    parts: int,
    dropout: Dropout | None,
    *,
    masked: bool,
) -> None:
    """s from a masked x and `lora_a`, or dS from dy and `lora_b`."""
    if not items.count:
        return
    rank_rows(
        in_TK,
        (factors.lora_a,) if masked else factors.lora_b,
        () if masked else factors.columns,
        ext,
        rows_TR,
        items=items.items,
        num_items=items.count,
        chunks=plan["chunks"],
        scaling=factors.scaling,
        parts=parts,
        dropout=dropout,
        masked=masked,
    )


_workspaces: WeakKeyDictionary[WorkItems, torch.Tensor] = WeakKeyDictionary()


def _workspace(items: WorkItems, device: torch.device) -> torch.Tensor:
    """Room for the parts of sums, kept: the next kernel starts before its user has ended, so memory
    given back between the two could be written by both."""
    if items not in _workspaces:
        units = max(items.workspace, 1) * WORKSPACE_UNIT
        _workspaces[items] = torch.empty(units, dtype=torch.float32, device=device)
    return _workspaces[items]
