"""Adapters on routed experts in a few launches, whatever the numbers of experts and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertFactors, ExpertOps, ExpertRuns, PlacedRows
from tlora_megatron.ops.experts.rank_tables import RankTables, rank_tables
from tlora_megatron.ops.experts.triton.products import down, up
from tlora_megatron.ops.experts.triton.sums import add_sums
from tlora_megatron.ops.experts.triton.tiles import tiles_of


class TritonExpertOps(ExpertOps):
    """Computes what `TorchExpertOps` defines; never waits for the device."""

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[ExpertFactors, RankTables] = WeakKeyDictionary()

    def forward(
        self, x: PlacedRows, y_QN: Tensor, runs: ExpertRuns, factors: ExpertFactors
    ) -> Sequence[Tensor]:
        """Adds the adapters' outputs to y; returns s `[Q, W]`, where W are rank rows."""
        tables, tiles = self.tables_of(factors), tiles_of(runs, len(y_QN), y_QN.device)
        s_QW = down(x, tables.lora_a, tables, tiles)
        up(y_QN, s_QW, tables.lora_b, tables, tiles)
        return (s_QW,)

    def input_backward(
        self,
        dy: PlacedRows,
        dx_QK: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        factors: ExpertFactors,
    ) -> Sequence[Tensor]:
        """Does what of `backward` needs no x; returns dS `[Q, W]`."""
        (s_QW,) = saved
        tables, tiles = self.tables_of(factors), tiles_of(runs, len(dx_QK), dx_QK.device)
        ds_QW = down(dy, tables.lora_b, tables, tiles)
        up(dx_QK, ds_QW, tables.lora_a, tables, tiles)
        add_sums(tables.grad_b, s_QW, dy, tables, tiles)
        return (ds_QW,)

    def input_sums(
        self, ds: Sequence[Tensor], x: PlacedRows, runs: ExpertRuns, factors: ExpertFactors
    ) -> None:
        """Does the rest of it: adds to gradients of A."""
        (ds_QW,) = ds
        tables, tiles = self.tables_of(factors), tiles_of(runs, len(ds_QW), ds_QW.device)
        add_sums(tables.grad_a, ds_QW, x, tables, tiles)

    def tables_of(self, factors: ExpertFactors) -> RankTables:
        """Returns the tables of a linear, made once."""
        if factors not in self._tables:
            self._tables[factors] = rank_tables(factors)
        return self._tables[factors]
