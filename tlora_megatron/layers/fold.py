"""The fold sharding: factors lie as the base's weight does, and the base GEMM takes them in.

Column-parallel. Layout in: x `[T, K]`, or `[T / tp, K]` under sequence parallelism. Layout out:
`[T, N / tp]`. Forward: all-gather of x under sequence parallelism. Backward: one all-reduce of dx,
or a reduce-scatter of it and a rank-sized all-reduce of dS; not the latter where the run has
block-diagonal jobs, for which the gathered x is kept instead. Without such jobs, over a base in
FP8, x is gathered as codes, and s made of the rank's own rows and summed (rank-sized): backward
needs no other row of x either. Row-parallel: x `[T, K / tp]`, out a
partial sum `[T, N]` that the linear's own reduction completes; no collective here.

Only the local input and the rank-sized s are saved; dropout is recomputed; gradients of the factors
go straight into the jobs' fp32 slabs.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import Computed, LinearLayout, OwnS, QuantisedInput
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.lora.linear_ops import Base, BoundLinear, SiteFactors
from tlora_megatron.ops.quantised.weight import KnownRows, QuantWeight
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.collectives import Pending, all_reduce
from tlora_megatron.parallel.lanes import Lane


class FoldStrategy:
    """Computes base and branch in one GEMM; a `GemmStrategy`.

    Args:
        block_diagonal_only: only block-diagonal adapters; standard ones are computed elsewhere.
    """

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

    def _own_s(self, x_WK: torch.Tensor, view: MicroBatchView) -> torch.Tensor:
        window = self.layout.input_window(view.rows.ends[-1])
        return self._bound(view).down(x_WK, window)

    def _bound(self, view: MicroBatchView) -> BoundLinear:
        factors = self.factors
        assert factors is not None, f"site {self._index} must have factors, got none"
        return self._ops.bind(factors, view.rows)

    def forward(
        self,
        x: torch.Tensor | QuantisedInput,
        base: Base,
        bias_N: torch.Tensor | None,
        view: MicroBatchView,
        lane: Lane | None,
    ) -> Computed:
        """Returns y `[T, N]`; see `GemmStrategy.forward`."""
        bound = self._bound(view)
        if isinstance(x, QuantisedInput):
            return self._of_codes(x, bound, base, bias_N, lane)
        full_TK = self.layout.gather_input(x) if lane is None else x
        y_TN, s = bound.forward(full_TK, base, bias_N)
        local = x if lane is None else lane.take_local()
        saved, sums_ds = full_TK, False
        if self._sums_ds and local is not None:
            saved, sums_ds = local.flatten(0, -2), True
        backward = FoldBackward(bound, self.layout, lane, sums_ds)
        return Computed(y_TN, (saved, s, base), backward.run)

    def _of_codes(
        self,
        x: QuantisedInput,
        bound: BoundLinear,
        base: Base,
        bias_N: torch.Tensor | None,
        lane: Lane | None,
    ) -> Computed:
        assert isinstance(base, QuantWeight), "codes come from a base that has them"
        assert x.s is not None, "adapters' s comes with the codes"
        y_TN = bound.product(x.x_WK, KnownRows(base, x.rows), bias_N, x.s)
        backward = FoldBackward(bound, self.layout, lane, sums_ds=True)
        return Computed(y_TN, (x.x_WK, x.s, base), backward.run)


class FoldBackward(NamedTuple):
    """The backward pass of `FoldStrategy`."""

    bound: BoundLinear
    layout: LinearLayout
    lane: Lane | None
    sums_ds: bool
    """x was saved as it was before gathering: dS is summed over the ranks instead."""

    def run(
        self,
        dy_TN: torch.Tensor,
        x_TK: torch.Tensor,
        s: torch.Tensor,
        base: Base,
        *,
        needs_dx: bool = True,
    ) -> torch.Tensor | None:
        """Returns dx `[T, K]`, which a lane has yet to reduce, and adds factors' gradients."""
        bound, layout, lane, sums_ds = self
        ds = bound.backward_up(dy_TN, s)
        # This rank's rows need dS of the whole output. Summing dS over the group costs [T, R];
        # gathering x again would cost [T, K]. Either way dA is a partial sum, TP's once a step;
        # and so it is over all rows, of what the rank's own outputs give.
        num_rows = bound.rows.ends[-1]
        window = layout.input_window(num_rows) if sums_ds else (0, num_rows)

        def add_factor_gradients(summed: torch.Tensor) -> None:
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
