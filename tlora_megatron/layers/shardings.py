"""Three ways to compute adapters under TP: fold, as the base's weight lies; S-LoRA's; black box.

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

A black box is a base linear whose GEMM and collective are not ours (Transformer Engine's). It is
called as it is (its FP8, its overlapped collectives) and the branch is added to its output. Ranks
exchange only rank-sized tensors:

                 forward                              backward
    column       s whole on every rank                dS summed, for dx
    column, SP   s of own rows, then gathered         dS summed, for dx and dA
    row          s summed                             nothing
    row, SP      s summed, used in own rows           dS of own rows, then gathered

Gradients are complete for the sharded factor, a partial sum over TP for the replicated one.
Gathering is summing: s and dS of rows that a rank does not hold are zero there.

Shapes: T rows of the micro-batch, W of them on this rank, K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import (
    Computed,
    GemmStrategy,
    LinearLayout,
    QuantisedInput,
    Strategy,
)
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.lora.linear_ops import Base, BoundLinear
from tlora_megatron.ops.lora.rank_places import RankPlaces
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
)
from tlora_megatron.parallel.lanes import Lane


class FoldStrategy(GemmStrategy):
    """Computes base and branch in one GEMM."""

    def __init__(
        self,
        bank: AdapterBank,
        site: Site,
        layout: LinearLayout,
        *,
        block_diagonal_only: bool = False,
    ) -> None:
        factors = bank.block_diagonal_factors if block_diagonal_only else bank.fused_factors
        super().__init__(bank.ops, site.index, factors, layout)
        # Ranks that have rows of A of their own need all rows of x for its gradient.
        self.sums_ds = layout.gathers_input and not bank.is_rank_sharded(site)

    def forward(
        self,
        x: Tensor | QuantisedInput,
        base: Base,
        bias_N: Tensor | None,
        view: MicroBatchView,
        lane: Lane | None,
    ) -> Computed:
        """Returns y `[T, N]`; see `GemmStrategy.forward`."""
        bound = self.bind(view)
        if isinstance(x, QuantisedInput):
            assert x.s is not None, "adapters' s comes with the codes"
            y_TN = bound.product(x.x_WK, x.known(base), bias_N, x.s)
            saved, s, sums_ds = x.x_WK, x.s, True
        else:
            full_TK = self.layout.gather_input(x) if lane is None else x
            y_TN, s = bound.forward(full_TK, base, bias_N)
            local = x if lane is None else lane.take_local()
            saved, sums_ds = full_TK, False
            if self.sums_ds and local is not None:
                saved, sums_ds = local.flatten(0, -2), True
        backward = partial(_fold_backward, bound, self.layout, lane, sums_ds)
        return Computed(y_TN, (saved, s, base), backward)


def _fold_backward(
    bound: BoundLinear,
    layout: LinearLayout,
    lane: Lane | None,
    sums_ds: bool,
    dy_TN: Tensor,
    x_TK: Tensor,
    s: Tensor,
    base: Base,
    *,
    needs_dx: bool = True,
) -> Tensor | None:
    """Returns dx `[T, K]`, which a lane has yet to reduce, and adds factors' gradients.

    Args:
        sums_ds: x was saved as it was before gathering: dS is summed over the ranks instead.
    """
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


class SLoraStrategy(GemmStrategy):
    """Computes base and branch with both factors of standard adapters sharded.

    Layouts and the collectives of x and dx are fold's; the module's table names the others.
    Saved: x, gathered where it is, and s. Its `factors` are standard adapters' `lora_b`, of a
    row-parallel linear `lora_a` too.
    """

    def __init__(self, bank: AdapterBank, site: Site, layout: LinearLayout) -> None:
        super().__init__(bank.ops, site.index, bank.fused_factors, layout)
        self._bank = bank

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
        bank, index = self._bank, self._index
        whole = own = self.bind(view)
        if index in bank.s_lora_a_factors:
            own = bank.ops.bind(bank.s_lora_a_factors[index], view.rows)
        exchange = _RankExchange(own, whole, self.layout)
        x_TK = self.layout.gather_input(x)
        s = exchange.gather(own.down(x_TK))
        local = local_s = None
        if index in bank.block_diagonal_factors:
            local = bank.ops.bind(bank.block_diagonal_factors[index], view.rows)
            base_TN, local_s = local.forward(x_TK, base, bias_N)
            y_TN = whole.up(s, base_TN, (0, len(x_TK)))
        else:
            y_TN = whole.product(x_TK, base, bias_N, s)
        backward = partial(_s_lora_backward, exchange, local)
        return Computed(y_TN, (x_TK, s, local_s, base), backward)


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


def _s_lora_backward(
    exchange: _RankExchange,
    local: BoundLinear | None,
    dy_TN: Tensor,
    x_TK: Tensor,
    s: Tensor,
    local_s: Tensor | None,
    base: Base,
    *,
    needs_dx: bool = True,
) -> Tensor | None:
    """Returns dx `[T, K]`, of this rank's rows, and adds factors' gradients.

    Args:
        local: with the factors of block-diagonal adapters.
    """
    own, whole, layout = exchange
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


Norm = Callable[[Tensor], Tensor]
"""The frozen norm that a base linear begins with."""


class BlackBoxStrategy(Strategy):
    """Adds the branch to a base's output, with the collectives of the module's table.

    Saved: x and the rank-sized s; the norm is computed again.
    """

    def __init__(self, bank: AdapterBank, site: Site, layout: LinearLayout) -> None:
        super().__init__(bank.ops, site.index, bank.fused_factors, layout)
        is_column, sequence_parallel = layout.kind == "column", layout.sequence_parallel
        self._sums_s = not is_column or sequence_parallel
        # dB of a row-parallel linear is to be a partial sum: of own features, or of own rows.
        self._keeps_own_s = not is_column and not sequence_parallel

    def forward(
        self, x_WK: Tensor, base_WN: Tensor, view: MicroBatchView, norm: Norm | None = None
    ) -> Computed:
        """Returns `base_y + branch(norm(x))`, `[W, N]`; there must be factors."""
        bound, layout, num_rows = self.bind(view), self.layout, view.rows.ends[-1]
        inputs_WK = (x_WK if norm is None else norm(x_WK)).to(bound.factors.lora_a.dtype)
        own = s = bound.down(_spread(inputs_WK, layout.input_window(num_rows), num_rows))
        if self._sums_s:
            s = _sum(own.clone() if self._keeps_own_s else own, layout).wait()
        y_WN = bound.up(s, base_WN, layout.output_window(num_rows))
        saved = (x_WK, own if self._keeps_own_s else s)
        return Computed(y_WN, saved, partial(_black_box_backward, bound, layout, norm))


def _black_box_backward(
    bound: BoundLinear,
    layout: LinearLayout,
    norm: Norm | None,
    dy_WN: Tensor,
    x_WK: Tensor,
    s: Tensor,
    *,
    needs_dx: bool = True,
) -> Tensor | None:
    """Returns the branch's part of dx `[W, K]`, and adds factors' gradients."""
    num_rows, is_column = bound.rows.ends[-1], layout.kind == "column"
    dy_TN = _spread(dy_WN.to(s.dtype), layout.output_window(num_rows), num_rows)
    ds = bound.backward_up(dy_TN, s)
    summed = Pending(ds, None)
    if is_column or layout.sequence_parallel:
        # Column without SP: dA is a partial sum over TP, of what each rank's columns give.
        keep = is_column and not layout.sequence_parallel
        summed = _sum(ds.clone() if keep else ds, layout)
        ds = ds if keep else summed.wait()
    window = layout.input_window(num_rows)
    leaf = inputs = x_WK
    if norm is not None:
        with torch.enable_grad():
            leaf = x_WK.detach().requires_grad_()
            inputs = norm(leaf)
    inputs_WK = inputs.detach().to(s.dtype).contiguous()
    bound.backward_down(inputs_WK, dy_TN, s, ds, window)
    if not needs_dx:
        return None
    dx_WK = bound.branch_dgrad(summed.wait(), window).to(x_WK.dtype)
    return dx_WK if norm is None else torch.autograd.grad(inputs, leaf, dx_WK)[0]


def _spread(x_WK: Tensor, window: tuple[int, int], num_rows: int) -> Tensor:
    """Returns the rows in their place among all of the micro-batch's, zeros elsewhere."""
    begin, end = window
    assert len(x_WK) == end - begin, f"rows must be {end - begin} on this rank, got {len(x_WK)}"
    if end - begin == num_rows:
        return x_WK.contiguous()
    x_TK = x_WK.new_zeros(num_rows, x_WK.shape[1])
    x_TK[begin:end] = x_WK
    return x_TK


def _sum(ranked: Tensor, layout: LinearLayout) -> Pending:
    """Starts summing s or dS over the group, in place."""
    return all_reduce(ranked, layout.group) if ranked.numel() else Pending(ranked, None)
