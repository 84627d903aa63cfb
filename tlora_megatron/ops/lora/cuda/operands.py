"""What the CUDA kernels are given of a linear's factors and a micro-batch's plan."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.cuda.calls import Arenas, Dropout, RankPart
from tlora_megatron.ops.lora.cuda.fit import suits
from tlora_megatron.ops.lora.cuda.sum_items import (
    DOWN,
    UP,
    SumInput,
    rows_per_run,
    sum_bounds,
    sum_items,
)
from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.plan_tensors import PlanTensors, WorkItems
from tlora_megatron.ops.lora.rank_form import rank_form
from tlora_megatron.ops.lora.site_tables import SiteTables
from tlora_megatron.ops.lora.triton.down import uses_dropout
from tlora_megatron.ops.routing.row_groups import RowGroups


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


@dataclass(frozen=True, eq=False)
class SumSizes:
    """What the work of rank_sums.cu follows from, beside a plan: one object for equal sizes.

    So that a work list is found by its address, whichever of the model's linears asks.
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
    """x over a window of rows and dy over all, as the sums that make dA and dB read them."""
    features = sum(c.size for c in sizes.columns)
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
        rows_per_run=rows_per_run(row_budget, features, blocks),
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
    """The work of rank_sums.cu in a micro-batch, over x's rows of a window.

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
    """What all launches of one linear have in common: it holds as long as its factors stay."""

    def __init__(self, factors: SiteFactors, tables: SiteTables) -> None:
        whole = factors.columns[0]
        self.tables = tables
        # Not the factors: this is kept in a dictionary that lets go of them.
        self._lora_a, self._lora_b, self._columns = factors.lora_a, factors.lora_b, factors.columns
        size_out, size_in = whole.groups * whole.stride, factors.lora_a.shape[1]
        self.sizes = sum_sizes(factors.columns, size_in, size_out)
        # Another linear's odd size may shift this one's gradients in the slabs: bulk copies fault.
        self.suits = factors.is_aligned and suits(factors, size_out, size_in)
        """Whether these kernels take the linear; nothing below is asked for where they do not."""

    @functools.cached_property
    def a(self) -> Arenas:
        """The arena of `lora_a`."""
        return Arenas((self._lora_a,), ())

    @functools.cached_property
    def b(self) -> Arenas:
        """The arenas of `lora_b`."""
        return Arenas(self._lora_b, self._columns)


def forward_part(s: torch.Tensor, site: CudaSite, plan: PlanTensors) -> RankPart | None:
    """What y adds to the base: s B^T; None where no row has an adapter."""
    if not plan.num_chunks:
        return None
    return RankPart(
        flat=s,
        form=rank_form(plan),
        factors=site.b,
        num_targets=len(site.b.arenas),
        tile_chunks=plan["tile_chunks"],
        chunk_rows=plan["chunk_b"],
        dropout=None,
    )


def dgrad_part(
    ds: torch.Tensor, site: CudaSite, plan: PlanTensors, dropout: Dropout | None
) -> RankPart | None:
    """What dx adds to the base: drop(dS A); None where no row has an adapter."""
    if not plan.num_chunks:
        return None
    return RankPart(
        flat=ds,
        form=rank_form(plan),
        factors=site.a,
        num_targets=len(site.b.arenas),
        tile_chunks=plan["tile_chunks"],
        chunk_rows=plan["chunk_a"],
        dropout=dropout,
    )
