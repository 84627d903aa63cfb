"""Two ways to shard adapters over TP: fold, as the base's weight lies, and S-LoRA's.

Fold, column-parallel. Layout in: x `[T, K]`, or `[T / tp, K]` under sequence parallelism. Layout
out: `[T, N / tp]`. Forward: all-gather of x under sequence parallelism. Backward: one all-reduce of
dx, or a reduce-scatter of it and a rank-sized all-reduce of dS; not the latter where the run has
block-diagonal jobs, for which the gathered x is kept instead. Without such jobs, over a base in
FP8, x is gathered as codes, and s made of the rank's own rows and summed: backward needs no other
row of x either. Row-parallel: x `[T, K / tp]`, out a partial sum `[T, N]` that the linear's own
reduction completes; no collective here. Saved: the local input and s.

S-LoRA (arXiv 2311.03285, section 6; the backward is ours) cuts both factors of standard adapters:

                 lora_a            lora_b             forward             backward
    column       rank rows         as base's rows     s all-gathered      dS reduce-scattered
    row          as base's columns rows               s summed            dS summed

A row-parallel linear's `s B_k^T` is a slice of the output: it is added into that slice of the
base's partial sum, before the base's one reduction. Every factor's gradient is complete where the
factor is: nothing is summed over TP at the end of a step. In return the input of a column-parallel
linear is kept whole under sequence parallelism: this rank's rows of `lora_a` meet every token.
Block-diagonal adapters are folded.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import Computed, LinearLayout, OwnS, QuantisedInput
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.lora.linear_ops import Base, BoundLinear, SiteFactors
from tlora_megatron.ops.lora.rank_places import RankPlaces
from tlora_megatron.ops.quantised.weight import KnownRows, QuantWeight
from tlora_megatron.ops.routing import MicroBatchView, RowGroups
from tlora_megatron.parallel.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
)
from tlora_megatron.parallel.lanes import Lane


class FoldStrategy:
    """Computes base and branch in one GEMM; a `GemmStrategy`."""

    def __init__(
        self,
        bank: AdapterBank,
        site: Site,
        layout: LinearLayout,
        *,
        block_diagonal_only: bool = False,
    ) -> None:
        self.layout = layout
        self._ops = bank.ops
        self._index = site.index
        self._factors = bank.block_diagonal_factors if block_diagonal_only else bank.fused_factors
        # Ranks that have rows of A of their own need all rows of x for its gradient.
        self._sums_ds = layout.gathers_input and not bank.is_rank_sharded(site)

    @property
    def factors(self) -> SiteFactors | None:
        """The adapters' weights here; None where no job has a target."""
        return self._factors.get(self._index)

    @property
    def own_s(self) -> OwnS | None:
        """Makes s of this rank's rows; None where nothing is gathered, or all of x is needed."""
        return self._own_s if self._sums_ds else None

    def _own_s(self, x_WK: Tensor, view: MicroBatchView) -> Tensor:
        window = self.layout.input_window(view.rows.ends[-1])
        return self._bound(view).down(x_WK, window)

    def _bound(self, view: MicroBatchView) -> BoundLinear:
        factors = self.factors
        assert factors is not None, f"site {self._index} must have factors, got none"
        return self._ops.bind(factors, view.rows)

    def forward(
        self,
        x: Tensor | QuantisedInput,
        base: Base,
        bias_N: Tensor | None,
        view: MicroBatchView,
        lane: Lane | None,
    ) -> Computed:
        """Returns y `[T, N]`; see `GemmStrategy.forward`."""
        bound = self._bound(view)
        if isinstance(x, QuantisedInput):
            assert isinstance(base, QuantWeight), "codes come from a base that has them"
            assert x.s is not None, "adapters' s comes with the codes"
            y_TN = bound.product(x.x_WK, KnownRows(base, x.rows), bias_N, x.s)
            saved, s, sums_ds = x.x_WK, x.s, True
        else:
            full_TK = self.layout.gather_input(x) if lane is None else x
            y_TN, s = bound.forward(full_TK, base, bias_N)
            local = x if lane is None else lane.take_local()
            saved, sums_ds = full_TK, False
            if self._sums_ds and local is not None:
                saved, sums_ds = local.flatten(0, -2), True
        backward = FoldBackward(bound, self.layout, lane, sums_ds)
        return Computed(y_TN, (saved, s, base), backward.run)


class FoldBackward(NamedTuple):
    """The backward pass of `FoldStrategy`."""

    bound: BoundLinear
    layout: LinearLayout
    lane: Lane | None
    sums_ds: bool
    """x was saved as it was before gathering: dS is summed over the ranks instead."""

    def run(
        self, dy_TN: Tensor, x_TK: Tensor, s: Tensor, base: Base, *, needs_dx: bool = True
    ) -> Tensor | None:
        """Returns dx `[T, K]`, which a lane has yet to reduce, and adds factors' gradients."""
        bound, layout, lane, sums_ds = self
        ds = bound.backward_up(dy_TN, s)
        # This rank's rows need dS of the whole output. Summing dS over the group costs [T, R];
        # gathering x again would cost [T, K]. Either way dA is a partial sum, TP's once a step;
        # and so it is over all rows, of what the rank's own outputs give.
        num_rows = bound.rows.ends[-1]
        window = layout.input_window(num_rows) if sums_ds else (0, num_rows)

        def add_factor_gradients(summed: Tensor) -> None:
            bound.backward_down(x_TK, dy_TN, s, summed, window)

        if lane is not None:
            dx_TK = bound.product_dgrad(dy_TN, ds, base)
            if sums_ds:
                lane.exchange(ds, add_factor_gradients)
            else:
                add_factor_gradients(ds)
            return dx_TK
        summed = all_reduce(ds.clone(), layout.group) if sums_ds else Pending(ds, None)
        pending = None
        if needs_dx:
            pending = layout.reduce_dgrad(bound.product_dgrad(dy_TN, ds, base))
        add_factor_gradients(summed.wait())
        return None if pending is None else pending.wait()


class SLoraStrategy:
    """Computes base and branch with both factors of standard adapters sharded; a `GemmStrategy`.

    Layouts and the collectives of x and dx are fold's; the module's table names the others.
    Saved: x, gathered where it is, and s.
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
        x: Tensor | QuantisedInput,
        base: Base,
        bias_N: Tensor | None,
        view: MicroBatchView,
        lane: Lane | None,
    ) -> Computed:
        """Returns y `[T, N]`; see `GemmStrategy.forward`. There are no lanes for it."""
        assert lane is None, "nano-batches must not take turns through s_lora"
        assert isinstance(x, Tensor), "codes are not enough for s"
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

    def gather(self, own_s: Tensor) -> Tensor:
        """Returns s of all rank rows and input features from what this rank's `lora_a` gives."""
        if self.layout.kind == "row":
            return self._sum(own_s)
        held = self.own.rank_places()
        if not held.num_values:
            return own_s
        gathered = all_gather_rows(held.take(own_s), self.layout.group)
        return self._parts().put(gathered)

    def scatter(self, whole_ds: Tensor) -> Tensor:
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

    def _sum(self, ranked: Tensor) -> Tensor:
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
        dy_TN: Tensor,
        x_TK: Tensor,
        s: Tensor,
        local_s: Tensor | None,
        base: Base,
        *,
        needs_dx: bool = True,
    ) -> Tensor | None:
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
