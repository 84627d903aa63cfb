"""`LinearOps` with the CUDA kernels of `csrc/`, for Hopper GPUs.

Launches: forward s and the rank-extended GEMM; backward dS, dB, the GEMM again, dA. Linears that
the kernels do not take (sizes that are no multiple of 8, fused outputs that are not laid out in
64s) go through Triton.

What decides an order of summation (tiles, runs, parts) follows from the run's budget of rows and
the linear's sizes, so that a job's bits do not depend on what else is packed. For the same reason
no GEMM here is cuBLAS's, which chooses by the number of rows.

s and dS are one flat tensor: the transposed chunks that the GEMM reads, then rows `[T, R]`, which
the sums over rows read.
"""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import torch

from tlora_megatron.ops.columns import OutputColumns
from tlora_megatron.ops.cuda_calls import (
    Dropout,
    GemmTile,
    RankPart,
    gemm,
    multiprocessors,
    rank_rows,
    rank_sums,
)
from tlora_megatron.ops.cuda_fit import gemm_tile, suits
from tlora_megatron.ops.cuda_items import (
    rank_columns,
    row_bounds,
    row_items,
    row_parts,
    rows_per_run,
    sum_bounds,
    sum_items,
)
from tlora_megatron.ops.factors import SiteFactors
from tlora_megatron.ops.plan_tensors import WORKSPACE_UNIT, PlanTensors, WorkItems
from tlora_megatron.ops.row_groups import RowGroups
from tlora_megatron.ops.tiling import RANK_CHUNK, ROW_TILE
from tlora_megatron.ops.triton_down import uses_dropout
from tlora_megatron.ops.triton_ops import TritonOps

_BLOCKS = 2
"""Blocks of the rank-sized kernels that a multiprocessor holds."""


class CudaOps(TritonOps):
    """The multi-adapter linear in fp16 or bf16 on a Hopper GPU; see `LinearOps` and `TritonOps`."""

    name = "cuda"
    _settled = 0
    """Address of the dS that the last kernel, a GEMM, has waited for; 0 after any other."""

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
        s, ext, s_TR = _new_rank_rows(x_TK, plan)
        items = plan.work_items(
            "cuda s",
            functools.partial(row_items, per_target=False),
            functools.partial(row_bounds, per_target=False),
        )
        dropout = _dropout(factors, rows, plan)
        parts = _row_parts(rows, x_TK.device)
        _rank_rows(x_TK, (factors.lora_a,), (), ext, s_TR, items, factors, plan, parts, dropout)
        tile = _gemm_tile(rows, len(weight_NK), x_TK.device)
        y_TN = x_TK.new_empty(len(x_TK), len(weight_NK))
        rank = _forward_part(ext, factors, plan)
        gemm(x_TK, weight_NK, y_TN, tile, transposed=True, early=True, bias_N=bias_N, rank=rank)
        return y_TN, s

    def backward_up(
        self, dy_TN: torch.Tensor, s: torch.Tensor, factors: SiteFactors, rows: RowGroups
    ) -> torch.Tensor:
        """Accumulates dB and returns dS."""
        plan = self.plan(factors, rows)
        if not _is_flat(s):
            return super().backward_up(dy_TN, s, factors, rows)
        dy_TN = dy_TN.contiguous()
        _, s_TR = _split(s, plan)
        ds, ext, ds_TR = _new_rank_rows(dy_TN, plan)
        items = plan.work_items(
            "cuda ds",
            functools.partial(row_items, per_target=True),
            functools.partial(row_bounds, per_target=True),
        )
        parts = _row_parts(rows, dy_TN.device)
        columns = factors.columns
        _rank_rows(dy_TN, factors.lora_b, columns, ext, ds_TR, items, factors, plan, parts, None)
        widths = [c.size for c in factors.columns]
        size = rows_per_run(rows.row_budget, sum(widths), multiprocessors(dy_TN.device))
        window = (0, len(dy_TN))
        width = dy_TN.shape[1]  # the plan keeps this, and not dy
        sums = plan.work_items(
            ("cuda db", columns),
            lambda p: sum_items(p, columns, width, size, window, last_first=True),
            lambda p: sum_bounds(p, widths, size),
        )
        _rank_sums(dy_TN, s_TR, sums, self.tables[factors].grad_b, 0, None, early=True)
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
        if not _is_flat(ds):
            return super().dgrad(dy_TN, ds, weight_NK, factors, rows)
        plan = self.plan(factors, rows)
        # Copies made here would be the previous kernel's work.
        early = dy_TN.is_contiguous() and weight_NK.is_contiguous()
        dy_TN, weight_NK = dy_TN.contiguous(), weight_NK.contiguous()
        ext, _ = _split(ds, plan)
        tile = _gemm_tile(rows, weight_NK.shape[1], dy_TN.device)
        dx_TK = dy_TN.new_empty(len(dy_TN), weight_NK.shape[1])
        rank = _dgrad_part(ext, factors, plan, _dropout(factors, rows, plan))
        gemm(dy_TN, weight_NK, dx_TK, tile, transposed=False, early=early, rank=rank)
        # Copies are given back here: what starts early must not be handed their memory.
        self._settled = ds.data_ptr() if early else 0
        return dx_TK

    def backward_down(
        self,
        x_TK: torch.Tensor,
        ds: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
        window: tuple[int, int],
    ) -> None:
        """Accumulates dA over the rows `window[0]:window[1]`, which are all that x holds."""
        if not _is_flat(ds):
            return super().backward_down(x_TK, ds, factors, rows, window)
        plan = self.plan(factors, rows)
        _, ds_TR = _split(ds, plan)
        depth = x_TK.shape[1]
        size = rows_per_run(rows.row_budget, depth, multiprocessors(x_TK.device))
        items = plan.work_items(
            ("cuda da", depth, window),
            lambda p: sum_items(p, (), depth, size, window, last_first=False),
            lambda p: sum_bounds(p, [depth], size),
        )
        dropout = _dropout(factors, rows, plan)
        # The GEMM of dgrad lets the next kernel start once dS is complete.
        early = x_TK.is_contiguous() and self._settled == ds.data_ptr()
        self._settled = 0
        grads = self.tables[factors].grad_a
        _rank_sums(x_TK.contiguous(), ds_TR, items, grads, window[0], dropout, early=early)
        return None


def _new_rank_rows(
    like: torch.Tensor, plan: PlanTensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An empty flat s or dS and its two parts."""
    columns = rank_columns(plan.layout)
    flat = like.new_empty(plan.num_chunks * RANK_CHUNK * ROW_TILE + plan.num_rows * columns)
    return flat, *_split(flat, plan)


def _split(flat: torch.Tensor, plan: PlanTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks `[C * 16, 256]` and the rows `[T, R]` of a flat s or dS."""
    ext, rows = flat.split(
        [plan.num_chunks * RANK_CHUNK * ROW_TILE, plan.num_rows * rank_columns(plan.layout)]
    )
    return ext.view(-1, ROW_TILE), rows.view(plan.num_rows, -1)


def _is_flat(s: torch.Tensor) -> bool:
    """Whether s or dS is of these kernels; Triton's have two dimensions."""
    return s.dim() == 1


def _dropout(factors: SiteFactors, rows: RowGroups, plan: PlanTensors) -> Dropout | None:
    if not uses_dropout(factors, rows):
        return None
    return Dropout(
        probability=factors.dropout,
        row_keys=rows.row_keys(plan.device),
        row_slots=plan["row_slots"],
        key=factors.dropout_key,
        first_column=factors.first_column,
    )


def _row_parts(rows: RowGroups, device: torch.device) -> int:
    return row_parts(rows.row_budget, multiprocessors(device))


def _gemm_tile(rows: RowGroups, columns: int, device: torch.device) -> GemmTile:
    return gemm_tile(rows.row_budget, columns, multiprocessors(device) // 2)


def _forward_part(ext: torch.Tensor, factors: SiteFactors, plan: PlanTensors) -> RankPart | None:
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


def _dgrad_part(
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


def _rank_rows(
    in_TK: torch.Tensor,
    arenas: tuple[torch.Tensor, ...],
    columns: tuple[OutputColumns, ...],
    ext: torch.Tensor,
    rows_TR: torch.Tensor,
    items: WorkItems,
    factors: SiteFactors,
    plan: PlanTensors,
    parts: int,
    dropout: Dropout | None,
) -> None:
    if not items.count:
        return
    rank_rows(
        in_TK,
        arenas,
        columns,
        ext,
        rows_TR,
        items=items.items,
        num_items=items.count,
        chunks=plan["chunks"],
        scaling=factors.scaling,
        parts=parts,
        dropout=dropout,
    )


_workspaces: WeakKeyDictionary[WorkItems, torch.Tensor] = WeakKeyDictionary()


def _workspace(items: WorkItems, device: torch.device) -> torch.Tensor:
    """Room for the parts of sums, kept: the next kernel starts before its user has ended, so memory
    given back between the two could be written by both."""
    if items not in _workspaces:
        units = max(items.workspace, 1) * WORKSPACE_UNIT
        _workspaces[items] = torch.empty(units, dtype=torch.float32, device=device)
    return _workspaces[items]


def _rank_sums(
    in_TK: torch.Tensor,
    rows_TR: torch.Tensor,
    items: WorkItems,
    grads: torch.Tensor,
    first_row: int,
    dropout: Dropout | None,
    *,
    early: bool,
) -> None:
    if not items.count:
        return
    rank_sums(
        in_TK,
        rows_TR,
        items=items.items,
        num_items=items.count,
        blocks=min(items.count, _BLOCKS * multiprocessors(in_TK.device)),
        grads=grads,
        workspace=_workspace(items, in_TK.device),
        counters=items.counters,
        first_row=first_row,
        early=early,
        dropout=dropout,
    )
