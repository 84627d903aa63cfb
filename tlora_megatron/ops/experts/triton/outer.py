"""Launches of `ops.experts.outer`: products with factors that experts share, or that each has."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns, PlacedRows
from tlora_megatron.ops.experts.rank_tables import Placed, RankTables, rank_rows
from tlora_megatron.ops.experts.shared_factors import OuterSide
from tlora_megatron.ops.experts.triton.products import down, up
from tlora_megatron.ops.experts.triton.sums import add_sums
from tlora_megatron.ops.experts.triton.tiles import tiles_of


def shrink(x_QC: Tensor, runs: ExpertRuns, side: OuterSide, width: int) -> Tensor:
    """Returns `x w^T` of each run's rows, `[Q, width]`; zeros elsewhere."""
    tables, tiles = _tables_of(side, width, x_QC.device), tiles_of(runs, len(x_QC), x_QC.device)
    out_QR = x_QC.new_zeros(len(x_QC), width)
    return down(PlacedRows(x_QC.contiguous()), tables.lora_a, tables, tiles, out_QW=out_QR)


def expand(s_QR: Tensor, y_QC: Tensor, runs: ExpertRuns, side: OuterSide) -> None:
    """Adds `s w` to y in the rows of each run."""
    tables = _tables_of(side, s_QR.shape[1], y_QC.device)
    up(y_QC, s_QR.contiguous(), tables.lora_a, tables, tiles_of(runs, len(y_QC), y_QC.device))


def add_gradients(s_QR: Tensor, x_QC: Tensor, runs: ExpertRuns, side: OuterSide) -> None:
    """Adds `s^T x` of each run's rows to the gradients of its factors, in ascending order."""
    tables = _tables_of(side, s_QR.shape[1], x_QC.device)
    tiles = tiles_of(runs, len(x_QC), x_QC.device)
    add_sums(tables.grad_a, s_QR.contiguous(), PlacedRows(x_QC.contiguous()), tables, tiles)


def scale(s_QR: Tensor, runs: ExpertRuns, scaling: Tensor) -> Tensor:
    """Multiplies each row by its adapter's scaling, in place; those of none by 0."""
    begins = tiles_of(runs, len(s_QR), s_QR.device).begins
    assert len(begins) == len(scaling) + 2, "runs of a micro-batch's own rows"
    of_slots = torch.cat([scaling, scaling.new_zeros(1)])
    of_rows = of_slots.repeat_interleave(begins.diff().long(), output_size=len(s_QR))
    return s_QR.mul_(of_rows[:, None])


_known: WeakKeyDictionary[OuterSide, RankTables] = WeakKeyDictionary()


def _tables_of(side: OuterSide, width: int, device: torch.device) -> RankTables:
    if side not in _known:
        _known[side] = _tables(side, width, device)
    return _known[side]


def _tables(side: OuterSide, width: int, device: torch.device) -> RankTables:
    slots = [
        [Placed(target.ranks.start, target.columns.start, target.weight) for target in targets]
        for targets in side.targets
    ]
    grads = [
        [Placed(target.ranks.start, target.columns.start, target.grad) for target in targets]
        for targets in side.targets
    ]
    widths = [max((t.ranks.stop for t in targets), default=0) for targets in side.targets]
    widths_S = torch.tensor(widths, dtype=torch.int32, device=device)
    rows, grad_rows = rank_rows(slots, width, device), rank_rows(grads, width, device)
    return RankTables(
        slots=len(widths),
        width=width,
        widths_S=widths_S,
        lora_a=rows,
        lora_b=rows,
        grad_a=grad_rows,
        grad_b=grad_rows,
        scaling_S=torch.ones(len(widths), device=device),
        positions=widths_S,
    )
