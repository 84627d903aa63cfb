"""S-LoRA's sharding: both factors of every standard adapter cut over TP, nothing replicated.

                 lora_a            lora_b             forward             backward
    column       rank rows         as base's rows     s all-gathered      dS reduce-scattered
    row          as base's columns rows               s summed            dS summed

A row-parallel linear's `s B_k^T` is a slice of the output: it is added into that slice of the
base's partial sum, before the base's one reduction, which so gathers the slices. All collectives
here are of `[tokens, rank]`; every factor's gradient is complete where the factor is, and nothing
is summed over TP at the end of a step. In return the input of a column-parallel linear is kept
whole under sequence parallelism: this rank's rows of `lora_a` meet every token.

Block-diagonal adapters need none of this: they are folded into the base GEMM (`layers.fold`).

Shapes: T rows, K features in, N features out. Source: S-LoRA (arXiv 2311.03285), section 6, whose
backward is ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import Computed, LinearLayout, OwnS, QuantisedInput
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.lora.linear_ops import Base, BoundLinear, SiteFactors
from tlora_megatron.ops.lora.rank_places import RankPlaces
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.ops.row_groups import RowGroups
from tlora_megatron.parallel.collectives import (
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
)
from tlora_megatron.parallel.lanes import Lane


class SLoraStrategy:
    """Computes base and branch with both factors of standard adapters sharded; a `GemmStrategy`.

    Layouts in and out, and the collectives of x and dx, are those of `layers.fold`; in addition
    those of the module's table. Saved: x, gathered where it is, and s.
    """

    def __init__(self, bank: AdapterBank, site: Site, layout: LinearLayout) -> None:
        self.layout = layout
        self._bank = bank
        self._index = site.index

    @property
    def factors(self) -> SiteFactors | None:
        """Standard adapters' `lora_b`, of a row-parallel linear `lora_a` too; None where no job has
        a target."""
        return self._bank.fused_factors.get(self._index)

    @property
    def own_s(self) -> OwnS | None:
        """None: this rank's rows of `lora_a` meet every token's x."""
        return None

    def forward(
        self,
        x: torch.Tensor | QuantisedInput,
        base: Base,
        bias_N: torch.Tensor | None,
        view: MicroBatchView,
        lane: Lane | None,
    ) -> Computed:
        """Returns y `[T, N]`; see `GemmStrategy.forward`. There are no lanes for it."""
        assert lane is None, "nano-batches must not take turns through s_lora"
        assert isinstance(x, torch.Tensor), "codes are not enough for s"
        bank, rows = self._bank, view.rows
        exchange = self._exchange(rows)
        x_TK = self.layout.gather_input(x)
        s = exchange.gather(exchange.own.down(x_TK))
        local = local_s = None
        local_factors = bank.block_diagonal_factors.get(self._index)
        if local_factors is None:
            y_TN = exchange.whole.product(x_TK, base, bias_N, s)
        else:
            local = bank.ops.bind(local_factors, rows)
            base_TN, local_s = local.forward(x_TK, base, bias_N)
            y_TN = exchange.whole.up(s, base_TN, (0, len(x_TK)))
        saved = (x_TK, s, local_s, base)
        return Computed(y_TN, saved, SLoraBackward(exchange, local, self.layout).run)

    def _exchange(self, rows: RowGroups) -> _RankExchange:
        bank, factors = self._bank, self.factors
        assert factors is not None, f"site {self._index} must have factors, got none"
        whole = own = bank.ops.bind(factors, rows)
        own_factors = bank.s_lora_a_factors.get(self._index)
        if own_factors is not None:
            own = bank.ops.bind(own_factors, rows)
        return _RankExchange(own, whole, self.layout)


class _RankExchange(NamedTuple):
    """The exchanges of s and dS between ranks in one linear."""

    own: BoundLinear
    """With this rank's part of `lora_a`."""
    whole: BoundLinear
    """With all rank rows."""
    layout: LinearLayout

    def gather(self, own_s: torch.Tensor) -> torch.Tensor:
        """Returns s of all rank rows and input features from what this rank's `lora_a` gives."""
        if self.layout.kind == "row":
            return self._sum(own_s)
        held = self.own.rank_places()
        if not held.num_values:
            return own_s
        gathered = all_gather_rows(held.take(own_s), self.layout.group)
        return self._parts().put(gathered)

    def scatter(self, whole_ds: torch.Tensor) -> torch.Tensor:
        """Returns the whole dS of this rank's part of `lora_a` from what its `lora_b` gives."""
        if self.layout.kind == "row":
            return self._sum(whole_ds)
        held = self.own.rank_places()
        if not held.num_values:
            return whole_ds
        parts = self._parts().take(whole_ds)
        return held.put(reduce_scatter_rows(parts, self.layout.group).wait())

    def _parts(self) -> RankPlaces:
        return self.whole.rank_places(self.layout.tp_size)

    def _sum(self, ranked: torch.Tensor) -> torch.Tensor:
        places = self.whole.rank_places()
        if not places.num_values:
            return ranked
        return places.put(all_reduce(places.take(ranked), self.layout.group).wait())


class SLoraBackward(NamedTuple):
    """The backward pass of `SLoraStrategy`."""

    exchange: _RankExchange
    local: BoundLinear | None
    """With the factors of block-diagonal adapters."""
    layout: LinearLayout

    def run(
        self,
        dy_TN: torch.Tensor,
        x_TK: torch.Tensor,
        s: torch.Tensor,
        local_s: torch.Tensor | None,
        base: Base,
        *,
        needs_dx: bool = True,
    ) -> torch.Tensor | None:
        """Returns dx `[T, K]`, of this rank's rows, and adds factors' gradients."""
        exchange, local, layout = self
        own, whole = exchange.own, exchange.whole
        window = (0, own.rows.ends[-1])
        ds = exchange.scatter(whole.backward_up(dy_TN, s))
        local_ds = None
        if local is not None and local_s is not None:
            local_ds = local.backward_up(dy_TN, local_s)
        pending = None
        if needs_dx:
            if local is None or local_ds is None:
                dx_TK = own.product_dgrad(dy_TN, ds, base)
            else:
                dx_TK = local.product_dgrad(dy_TN, local_ds, base)
                dx_TK.add_(own.branch_dgrad(ds, window))
            pending = layout.reduce_dgrad(dx_TK)
        own.backward_down(x_TK, dy_TN, s, ds, window, None if whole is own else whole)
        if local is not None and local_s is not None and local_ds is not None:
            local.backward_down(x_TK, dy_TN, local_s, local_ds, window)
        return None if pending is None else pending.wait()
