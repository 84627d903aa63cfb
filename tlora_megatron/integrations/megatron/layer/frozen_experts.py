"""Routed experts in the place of a frozen layer's MLP: all of it without autograd.

    y[t] = sum over e in C(t), ascending: (w[t, e] * swiglu(x[t] Wgu_e^T)) Wd_e^T

and adapters on both linears (`ops.experts.branch`). Weights multiply before the second linear, so
that backward needs no expert's output; biases of gpt-oss' second linears are weighed, too. Saved
are the first linear's outputs and what the router keeps; with adapters the experts' input, too.

Layout: x is this rank's rows, or all of them as `LinearLayout` says. Where tensor parallelism cuts
experts, rows are gathered and results reduced as around a dense MLP, each way; elsewhere each
rank's rows go to the experts' ranks from where they are: an all-to-all there and back, each way.

Shapes: T rows, H hidden features, E experts, L of them here, I features inside one here, R = T K
rows to all experts, Q rows that meet those of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.expert_parts import (
    LocalExperts,
    OuterCall,
    Router,
    SharedExpert,
    own_window,
)
from tlora_megatron.integrations.megatron.layer.frozen_sublayer import Inner, walk_back
from tlora_megatron.layers.linear import LinearLayout
from tlora_megatron.layers.multi_adapter import reduced
from tlora_megatron.model.spec import ExpertsSpec
from tlora_megatron.ops.experts.branch import PlacedRows, weights_grad
from tlora_megatron.ops.experts.choice import token_runs
from tlora_megatron.ops.experts.rows import (
    ExpertRows,
    RowSlots,
    route_vjp,
    sort_rows,
    weighted_glu,
    weighted_glu_back,
)
from tlora_megatron.ops.frozen.parts import Vjp
from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.collectives import ExpertExchange, Journey
from tlora_megatron.parallel.lanes import Lane


class FrozenExperts(nn.Module):
    """Router and experts of one layer, with Megatron's names of their weights.

    Args:
        expert_tp: tensor-parallel ranks that share each of them.
        shared_ffn_size: of the expert that all rows meet; None = there is none.
    """

    def __init__(
        self,
        config: Any,
        *,
        spec: ExpertsSpec,
        ep_size: int,
        expert_tp: int,
        shared_ffn_size: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.exchange = ExpertExchange(
            group=parallel_state.get_expert_model_parallel_group() if ep_size > 1 else None,
            size=ep_size,
        )
        hidden, inner = config.hidden_size, spec.ffn_size // expert_tp
        num_local = spec.num_experts // ep_size
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        biased = spec.glu is not None
        self.router = Router((spec.num_experts, hidden), place, biased=biased)
        self.experts = LocalExperts(num_local, hidden, inner, place, biased=biased)
        cut = config.tensor_model_parallel_size > 1 and expert_tp > 1
        self.rows_in = _Edge(_layout("column", config, cut=cut))
        self.rows_out = _Edge(_layout("row", config, cut=cut))
        self.shared_experts = None
        if shared_ffn_size is not None:
            self.shared_experts = SharedExpert(config, shared_ffn_size)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """`[T, 1, H]` to the same, differentiable in it; the second value is Megatron's bias."""
        routed = _Experts.apply(hidden_states, self)
        if self.shared_experts is None:
            return routed, None
        return routed + self.shared_experts(hidden_states), None

    @property
    def parts(self) -> tuple[Any, Inner, Any]:
        """What a frozen sublayer has: a first linear, what is between, and a second one."""
        if self.shared_experts is None:
            return self.rows_in, self.compute_vjp, self.rows_out
        whole = _Edge(LinearLayout(kind="row"))
        return whole, self._beside_shared_vjp, whole

    def _beside_shared_vjp(
        self, x_TH: Tensor, view: MicroBatchView, lane: Lane | None = None
    ) -> tuple[Tensor, Vjp]:
        """Computes routed and shared experts of this rank's rows."""
        assert self.shared_experts is not None, "the layer has none"
        routed_TH, routed_back = self.routed_vjp(x_TH, view)
        shared_TH, shared_back = self.shared_experts.product_vjp(x_TH, view)
        return routed_TH + shared_TH, lambda dy: routed_back(dy) + shared_back(dy)

    def routed_vjp(self, x_TH: Tensor, view: MicroBatchView | None = None) -> tuple[Tensor, Vjp]:
        """Computes the routed experts of this rank's rows, gathered and reduced inside."""
        backs: list[Vjp] = []
        for run in (self.rows_in.product_vjp, self.compute_vjp, self.rows_out.product_vjp):
            x_TH, back = run(x_TH, view)
            backs.append(back)
        return x_TH, functools.partial(walk_back, backs)

    def compute_vjp(
        self, x_TH: Tensor, view: MicroBatchView | None = None, lane: Lane | None = None
    ) -> tuple[Tensor, Vjp]:
        """Computes the experts of all rows that are given; returns y `[T, H]` and the way back.

        Args:
            view: of the rows; without one no adapter is computed.
        """
        routing, router_back = route_vjp(x_TH, self.router.weight, self.spec, self.router.bias)
        window = None if view is None else self._adapted_rows(view, x_TH)
        slots = None
        if view is not None and window is not None:
            slots = RowSlots(view.rows.row_slots(x_TH.device)[window], view.num_slots)
        rows = sort_rows(routing.experts_TK, self.spec.num_experts, slots)
        journey = self.exchange.begin(rows.counts_ES)
        outer = self._outer_call(view, window, rows, journey)
        weights_Q = journey.there(rows.pick(routing.weights_TK))
        fc1, fc2 = self.experts.linear_fc1, self.experts.linear_fc2
        x_QH = journey.there(rows.spread(x_TH))
        source = _source(x_TH, x_QH, rows, journey)
        inner, s_1 = fc1.product(x_QH, journey.runs, source)
        outer_1 = outer.add_to_first(x_TH, inner)
        hidden_QI = weighted_glu(inner, weights_Q, self.spec.glu)
        y_QH, s_2 = fc2.product(hidden_QI, journey.runs, weights_Q=weights_Q)
        outer_2 = outer.sum_second(hidden_QI)
        del hidden_QI
        y_TH = rows.sum(journey.back(y_QH))
        del y_QH
        outer.add_to_second(outer_2, y_TH)
        del x_QH
        saved = _Saved(
            rows, journey, weights_Q, inner, source if s_1 else None, s_1, s_2,
            outer, outer_1, outer_2,
        )  # fmt: skip

        def vjp(dy_TH: Tensor) -> Tensor:
            dx_TH, dweights_R = self._back(dy_TH, saved)
            return dx_TH + router_back(dweights_R[rows.places_TK])

        return y_TH, vjp

    def _back(self, dy_TH: Tensor, saved: _Saved) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x through the experts, and of the weights `[R]`, fp32."""
        rows, journey, weights_Q, inner, source, s_1, s_2, outer, outer_1, outer_2 = saved
        fc1, fc2 = self.experts.linear_fc1, self.experts.linear_fc2
        dy_QH = journey.there(rows.spread(dy_TH))
        hidden = functools.partial(weighted_glu, inner, weights_Q, self.spec.glu)
        spread_from = _source(dy_TH, dy_QH, rows, journey)
        dhidden, add_sums = fc2.dgrad(dy_QH, s_2, journey.runs, spread_from)
        through_biases_Q = None
        if fc2.biases_LN is not None:
            through_biases_Q = weights_grad(dy_QH, fc2.biases_LN, journey.runs)
        del dy_QH, spread_from
        outer.second_back(dy_TH, dhidden, hidden, outer_2)
        dinner, dweights_Q, hidden_QI = weighted_glu_back(
            dhidden, inner, weights_Q, self.spec.glu, with_result=add_sums is not None
        )
        if through_biases_Q is not None:
            dweights_Q += through_biases_Q
        del dhidden
        if add_sums is not None and hidden_QI is not None:
            add_sums(PlacedRows(hidden_QI))
        del hidden_QI
        dx_QH, add_sums = fc1.dgrad(dinner, s_1, journey.runs)
        if add_sums is not None:
            assert source is not None, "adapters keep their input"
            add_sums(source)
        dx_TH = rows.sum(journey.back(dx_QH))
        outer.first_back(dinner, dx_TH, outer_1)
        return dx_TH, journey.back(dweights_Q)

    def _adapted_rows(self, view: MicroBatchView, x_TH: Tensor) -> slice | None:
        """Returns the rows of the view that x has; None if no adapter is on these experts."""
        linears = (self.experts.linear_fc1, self.experts.linear_fc2)
        if all(linear.factors is None and linear.outer is None for linear in linears):
            return None
        return own_window(view, len(x_TH))

    def _outer_call(
        self, view: MicroBatchView | None, window: slice | None, rows: ExpertRows, journey: Journey
    ) -> OuterCall:
        """Returns the part of adapters whose outer factors experts share; there may be none."""
        if view is None or window is None:
            nothing = token_runs((0,), slice(0, 0))
            return OuterCall(first=None, second=None, rows=rows, journey=journey, tokens=nothing)
        return OuterCall(
            first=self.experts.linear_fc1.outer,
            second=self.experts.linear_fc2.outer,
            rows=rows,
            journey=journey,
            tokens=token_runs(view.rows.ends, window),
        )


def _source(x_TH: Tensor, x_QH: Tensor, rows: ExpertRows, journey: Journey) -> PlacedRows:
    """Returns where adapters read rows: those that are here are read as they were given."""
    return rows.placed(x_TH) if journey.order_Q is None else PlacedRows(x_QH)


class _Saved(NamedTuple):
    rows: ExpertRows
    journey: Journey
    weights_Q: Tensor
    inner: Tensor
    """Gate and up, `[Q, 2 I]`."""
    source: PlacedRows | None
    """x, as it was given or, of several ranks, as it came; None where no adapter reads it."""
    s_1: Sequence[Tensor]
    """What adapters on the first linear keep, and on the second one."""
    s_2: Sequence[Tensor]
    outer: OuterCall
    outer_1: tuple[Tensor, Tensor] | None
    """What it keeps of the first linear, and of the second one."""
    outer_2: Tensor | None


def _layout(kind: Any, config: Any, *, cut: bool) -> LinearLayout:
    if not cut:
        return LinearLayout(kind=kind)
    return LinearLayout(
        kind=kind,
        group=parallel_state.get_tensor_model_parallel_group(),
        tp_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        reduces_dgrad=kind == "column" and not config.sequence_parallel,
    )


class _Edge(nn.Module):
    """Stands where a dense MLP has a linear: gathers the rows that the experts take, or sums the
    parts of experts over the ranks that share them."""

    tlora_adapters = None

    def __init__(self, layout: LinearLayout) -> None:
        super().__init__()
        self.layout = layout

    def product_vjp(
        self, x: Tensor, view: MicroBatchView | None = None, lane: Lane | None = None
    ) -> tuple[Tensor, Vjp]:
        """Returns the moved rows, and the way back."""
        if self.layout.kind == "row":
            return reduced(x, lambda dy: dy, self.layout)
        return self.layout.gather_input(x), lambda dx: self.layout.reduce_dgrad(dx).wait()


class _Experts(torch.autograd.Function):
    """Routed experts as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, module: FrozenExperts) -> Tensor:
        x, ctx.back = module.routed_vjp(hidden.contiguous().flatten(0, -2), current_micro_batch())
        return x.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        grad = ctx.back(dout.contiguous().flatten(0, -2))
        return grad.view(dout.shape), None
