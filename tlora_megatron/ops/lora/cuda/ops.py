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

from tlora_megatron.ops.lora.cuda.calls import (
    Arenas,
    Dropout,
    GemmTile,
    gemm,
    multiprocessors,
    rank_rows,
    rank_sums,
)
from tlora_megatron.ops.lora.cuda.fit import gemm_tile
from tlora_megatron.ops.lora.cuda.operands import (
    CudaSite,
    dgrad_part,
    dropout_of,
    forward_part,
    sums_of,
)
from tlora_megatron.ops.lora.cuda.row_items import row_bounds, row_items, row_parts
from tlora_megatron.ops.lora.cuda.sum_items import DOWN, UP
from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.plan_tensors import PlanTensors
from tlora_megatron.ops.lora.rank_form import form_places, is_flat, rank_form
from tlora_megatron.ops.lora.rank_places import RankPlaces, cached_places
from tlora_megatron.ops.lora.triton.config import KernelConfig
from tlora_megatron.ops.lora.triton.gather import gather
from tlora_megatron.ops.lora.triton.ops import TritonOps
from tlora_megatron.ops.routing.row_groups import RowGroups

_BLOCKS = 2
"""Blocks of the rank-sized kernels that a multiprocessor holds."""
_S_ITEMS, _DS_ITEMS = (
    (
        f"cuda rows, per target: {per_target}",
        functools.partial(row_items, per_target=per_target),
        functools.partial(row_bounds, per_target=per_target),
    )
    for per_target in (False, True)
)
"""Arguments of `PlanTensors.work_items`."""


class CudaOps(TritonOps):
    """The multi-adapter linear in fp16 or bf16 on a Hopper GPU; see `LinearOps` and `TritonOps`."""

    name = "cuda"

    def __init__(self, *, graph_safe: bool = False, config: KernelConfig | None = None) -> None:
        super().__init__(graph_safe=graph_safe, config=config)
        self._sites: WeakKeyDictionary[SiteFactors, CudaSite] = WeakKeyDictionary()

    def site(self, factors: SiteFactors) -> CudaSite:
        """What is kept of a linear as long as its factors stay where they are."""
        site = self._sites.get(factors)
        if site is None:
            site = self._sites[factors] = CudaSite(factors, self.tables[factors])
        return site

    def forward(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns y `[T, N]` and s."""
        # s is made of it first: copies in `linear` would be the previous kernel's work.
        x_TK, weight_NK = x_TK.contiguous(), weight_NK.contiguous()
        s = self.down(x_TK, factors, rows)
        return self.linear(x_TK, weight_NK, bias_N, s, factors, rows), s

    def down(self, x_TK: torch.Tensor, factors: SiteFactors, rows: RowGroups) -> torch.Tensor:
        """Returns s."""
        site = self.site(factors)
        if not site.suits:
            return super().down(x_TK, factors, rows)
        plan = self.plan(factors, rows)
        dropout, x_TK = dropout_of(factors, rows, plan), x_TK.contiguous()
        return _rank_rows(x_TK, site.a, factors.scaling, plan, rows, dropout, masked=True)

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        s: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> torch.Tensor:
        """Returns y `[T, N]`."""
        if not is_flat(s):
            return super().linear(x_TK, weight_NK, bias_N, s, factors, rows)
        early = x_TK.is_contiguous() and weight_NK.is_contiguous()
        x_TK, weight_NK = x_TK.contiguous(), weight_NK.contiguous()
        columns = weight_NK.shape[0]
        tile = _gemm_tile(rows, columns, x_TK.device)
        y_TN = x_TK.new_empty(x_TK.shape[0], columns)
        rank = forward_part(s, self.site(factors), self.plan(factors, rows))
        gemm(x_TK, weight_NK, y_TN, tile, transposed=True, early=early, bias_N=bias_N, rank=rank)
        return y_TN

    def rank_places(self, factors: SiteFactors, rows: RowGroups, parts: int = 1) -> RankPlaces:
        """Places among the rows of `RankForm`, and in its chunks."""
        if not self.site(factors).suits:
            return super().rank_places(factors, rows, parts)
        plan = self.plan(factors, rows)
        build = form_places(rows, plan)
        return cached_places(rows, plan.layout, parts, plan.device, "cuda", build, gather)

    def backward_up(
        self, dy_TN: torch.Tensor, s: torch.Tensor, factors: SiteFactors, rows: RowGroups
    ) -> torch.Tensor:
        """Returns dS, with the `1 / (1 - p)` of dropout: masks are all that its readers apply."""
        if not is_flat(s):
            return super().backward_up(dy_TN, s, factors, rows)
        site, plan = self.site(factors), self.plan(factors, rows)
        dropout = dropout_of(factors, rows, plan)
        dy_TN = dy_TN.contiguous()
        return _rank_rows(dy_TN, site.b, factors.scaling, plan, rows, dropout, masked=False)

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
        tile = _gemm_tile(rows, weight_NK.shape[1], dy_TN.device)
        dx_TK = dy_TN.new_empty(dy_TN.shape[0], weight_NK.shape[1])
        rank = dgrad_part(ds, self.site(factors), plan, dropout_of(factors, rows, plan))
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
        up_factors: SiteFactors | None = None,
    ) -> None:
        """Accumulates dA over the rows of a window, which are all that x holds, and dB over all."""
        if up_factors is None and is_flat(ds):
            self._sum(x_TK, dy_TN, s, ds, factors, rows, window, (DOWN, UP))
            return
        if is_flat(ds):
            self._sum(x_TK, dy_TN, ds, ds, factors, rows, window, (DOWN,))
        else:
            super().backward_down(x_TK, dy_TN, s, ds, factors, rows, window)
        if up_factors is not None and is_flat(s):
            self._sum(x_TK, dy_TN, s, s, up_factors, rows, window, (UP,))

    def _sum(
        self,
        x_TK: torch.Tensor,
        dy_TN: torch.Tensor,
        s: torch.Tensor,
        ds: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
        window: tuple[int, int],
        kinds: tuple[int, ...],
    ) -> None:
        """dA, dB or both; of s and dS what is not read must have the factors' form all the same."""
        site, plan = self.site(factors), self.plan(factors, rows)
        multi = multiprocessors(dy_TN.device)
        items = sums_of(plan, site.sizes, rows.row_budget, window, multi, kinds)
        if not items.count:
            return
        rank_sums(
            x_TK.contiguous(),
            ds,
            dy_TN.contiguous(),
            s,
            rank_form(plan),
            items=items.items,
            num_items=items.count,
            blocks=min(items.count, _BLOCKS * multi),
            grad_a=site.tables.grad_a,
            grad_b=site.tables.grad_b,
            workspace=items.partial_sums,
            counters=items.counters,
            first_row=window[0],
            # dS was computed since dy and s were written. A copy made here is not.
            early=dy_TN.is_contiguous(),
            dropout=dropout_of(factors, rows, plan),
        )


def _row_parts(rows: RowGroups, device: torch.device) -> int:
    return row_parts(rows.row_budget, multiprocessors(device))


def _gemm_tile(rows: RowGroups, columns: int, device: torch.device) -> GemmTile:
    return gemm_tile(rows.row_budget, columns, multiprocessors(device) // 2)


def _rank_rows(
    in_TK: torch.Tensor,
    arenas: Arenas,
    scaling: torch.Tensor,
    plan: PlanTensors,
    rows: RowGroups,
    dropout: Dropout | None,
    *,
    masked: bool,
) -> torch.Tensor:
    """s from a masked x and `lora_a`, or dS from dy and `lora_b`."""
    form = rank_form(plan)
    flat = in_TK.new_empty(form.numel)
    items = plan.work_items(*(_S_ITEMS if masked else _DS_ITEMS))
    if not items.count:
        return flat
    rank_rows(
        in_TK,
        arenas,
        flat,
        form,
        items=items.items,
        num_items=items.count,
        chunks=plan["chunks"],
        scaling=scaling,
        parts=_row_parts(rows, in_TK.device),
        dropout=dropout,
        masked=masked,
    )
    return flat
