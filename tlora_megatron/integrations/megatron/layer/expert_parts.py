"""Parts of a layer with routed experts: weights, the shared expert, adapters with a shared factor.

The shared expert, whose linears are parallel and carry adapters as those of a dense MLP do; w is
frozen and whole on every rank:

    y[t] = sigmoid(x[t] w) * (swiglu(x[t] Wgu^T) Wd^T)

The shared factor multiplies a rank's own rows, before they go to their experts or after they have
come back; between there and here rank columns travel as the rows do. What tensor parallelism makes
partial is summed where the rows' results are, and gradients of shared factors once a step.

Shapes: E experts, L of them here, Q rows that meet these, K features in, N features out, H hidden,
T rows here, R = T K of them at all experts, C rank columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import MultiAdapter
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.experts.branch import (
    ExpertFactors,
    ExpertRuns,
    OuterFactors,
    PlacedRows,
    add_biases,
)
from tlora_megatron.ops.experts.choice import (
    InputSums,
    add_gradients,
    expand,
    expert_linear,
    expert_linear_dgrad,
    scale,
    shrink,
)
from tlora_megatron.ops.experts.rows import ExpertRows
from tlora_megatron.ops.frozen.parts import Vjp, swiglu, swiglu_vjp
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.collectives import Journey


def own_window(view: MicroBatchView, num_rows: int) -> slice:
    """Returns which rows of a micro-batch a rank has: all, or those of sequence parallelism."""
    begin = 0
    if num_rows < view.num_tokens:
        begin = num_rows * parallel_state.get_tensor_model_parallel_rank()
    return slice(begin, begin + num_rows)


class Router(nn.Module):
    """The router's weight `[E, H]`, and gpt-oss' bias `[E]`."""

    bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, int], place: dict[str, Any], *, biased: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, **place))
        bias = nn.Parameter(torch.empty(shape[:1], **place)) if biased else None
        self.register_parameter("bias", bias)


class LocalExperts(nn.Module):
    """The two linears of this rank's experts."""

    def __init__(
        self, count: int, hidden: int, inner: int, place: dict[str, Any], *, biased: bool
    ) -> None:
        super().__init__()
        self.linear_fc1 = StackedWeights((count, 2 * inner, hidden), place, biased=biased)
        self.linear_fc2 = StackedWeights((count, hidden, inner), place, biased=biased)


class StackedWeights(nn.Module, MultiAdapter):
    """One linear of all local experts: parameters of each, side by side in one tensor."""

    stacked: Tensor
    biases_LN: Tensor | None = None
    """Where experts are cut, the second linears' are those of the first rank, zeros on others."""
    tlora_bank: tuple[AdapterBank, Site] | None = None

    def __init__(self, shape: tuple[int, int, int], place: dict[str, Any], *, biased: bool) -> None:
        super().__init__()
        self._hold("stacked", "weight", torch.empty(shape, **place))
        if biased:
            self._hold("biases_LN", "bias", torch.empty(shape[:2], **place))

    def _hold(self, attribute: str, name: str, values: Tensor) -> None:
        object.__setattr__(self, attribute, values)
        for number, value in enumerate(values.unbind()):
            self.register_parameter(f"{name}{number}", nn.Parameter(value, requires_grad=False))

    def bind_adapters(self, bank: AdapterBank, site: Site) -> None:
        object.__setattr__(self, "tlora_bank", (bank, site))

    @property
    def factors(self) -> ExpertFactors | None:
        """The factors of the present adapters; None if none is on this linear."""
        if self.tlora_bank is None:
            return None
        bank, site = self.tlora_bank
        return bank.expert_factors.get(site.index)

    @property
    def outer(self) -> OuterFactors | None:
        """Those of adapters whose outer factor all experts share."""
        if self.tlora_bank is None:
            return None
        bank, site = self.tlora_bank
        return bank.outer_factors.get(site.index)

    def product(
        self,
        x_QK: Tensor,
        runs: ExpertRuns,
        source: PlacedRows | None = None,
        weights_Q: Tensor | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns the linear's output with the adapters', and what their backward needs.

        Args:
            source: what x was spread from.
            weights_Q: have multiplied x, and multiply a bias; None = nothing has.
        """
        y_QN, saved = expert_linear(x_QK, self.stacked, runs, self.factors, source)
        if self.biases_LN is not None:
            add_biases(y_QN, self.biases_LN, runs, weights_Q)
        return y_QN, saved

    def dgrad(
        self,
        dy_QN: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        source: PlacedRows | None = None,
    ) -> tuple[Tensor, InputSums | None]:
        """Returns dx, and what is still to be given `product`'s input: None without adapters.

        Args:
            source: what dy was spread from.
        """
        return expert_linear_dgrad(dy_QN, self.stacked, saved, runs, self.factors, source)


class SharedExpert(nn.Module):
    """The shared expert of one layer, with Megatron's names of its weights.

    Args:
        ffn_size: of the whole expert.
    """

    linear_fc1: Any
    linear_fc2: Any

    def __init__(self, config: Any, ffn_size: int) -> None:
        super().__init__()
        common: dict[str, Any] = {
            "config": config,
            "bias": False,
            "skip_bias_add": True,
            "init_method": config.init_method,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
        }
        hidden = config.hidden_size
        self.linear_fc1 = ColumnParallelLinear(
            hidden, 2 * ffn_size, gather_output=False, stride=2, **common
        )
        self.linear_fc2 = RowParallelLinear(ffn_size, hidden, input_is_parallel=True, **common)
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.gate_weight = nn.Parameter(torch.empty(1, hidden, **place))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[T, 1, H]` to the same, by autograd."""
        intermediate, _ = self.linear_fc1(hidden_states)
        out, _ = self.linear_fc2(swiglu(intermediate))
        return self._gate(hidden_states) * out

    def product_vjp(self, x_TH: Tensor, view: MicroBatchView) -> tuple[Tensor, Vjp]:
        """Computes this rank's rows `[T, H]`, gathered and reduced inside; returns the way back."""
        intermediate, fc1_back = self.linear_fc1.product_vjp(x_TH, view, None)
        inner, swiglu_back = swiglu_vjp(intermediate)
        out_TH, fc2_back = self.linear_fc2.product_vjp(inner, view, None)
        gate_T1 = self._gate(x_TH)

        def vjp(dy_TH: Tensor) -> Tensor:
            dgate_T1 = (dy_TH.float() * out_TH.float()).sum(-1, keepdim=True)
            dlogit_T1 = dgate_T1 * (gate_T1 * (1 - gate_T1)).float()
            dx_TH = fc1_back(swiglu_back(fc2_back(dy_TH * gate_T1)))
            return dx_TH + dlogit_T1.to(dx_TH.dtype) * self.gate_weight

        return gate_T1 * out_TH, vjp

    def _gate(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, self.gate_weight))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OuterCall:
    """The adapters' part of one call; every rank of the exchange makes the same of its methods."""

    first: OuterFactors | None
    """Those on gate and up; None = no adapter has some."""
    second: OuterFactors | None
    """Those on down."""
    rows: ExpertRows
    journey: Journey
    tokens: ExpertRuns
    """The adapters' rows here."""

    def add_to_first(self, x_TH: Tensor, y_QN: Tensor) -> tuple[Tensor, Tensor] | None:
        """Adds to the first linear's output; collective where experts are on several ranks.

        Returns:
            x and u `[Q, C]`, which backward needs.
        """
        if self.first is None:
            return None
        u_TC = shrink(x_TH, self.tokens, self.first.shared, self.first.width)
        u_QC = self._there(scale(u_TC, self.tokens, self.first))
        expand(u_QC, y_QN, self.journey.runs, self.first.own)
        return x_TH, u_QC

    def first_back(self, dy_QN: Tensor, dx_TH: Tensor, saved: tuple[Tensor, Tensor] | None) -> None:
        """Adds to dx of the rows here, and to gradients; collective likewise."""
        if self.first is None:
            return
        assert saved is not None, "from `add_to_first`"
        x_TH, u_QC = saved
        runs, own, shared = self.journey.runs, self.first.own, self.first.shared
        add_gradients(u_QC, dy_QN, runs, own)
        du_QC = shrink(dy_QN, runs, own, self.first.width)
        du_TC = scale(self._back(du_QC), self.tokens, self.first)
        add_gradients(du_TC, x_TH, self.tokens, shared)
        expand(du_TC, dx_TH, self.tokens, shared)

    def sum_second(self, h_QK: Tensor) -> Tensor | None:
        """Returns s, scaled, summed over each row's experts; collective likewise."""
        if self.second is None:
            return None
        s_QC = shrink(h_QK, self.journey.runs, self.second.own, self.second.width)
        return scale(self._back(s_QC), self.tokens, self.second)

    def add_to_second(self, s_TC: Tensor | None, y_TH: Tensor) -> None:
        """Adds to the experts' summed output."""
        if self.second is not None and s_TC is not None:
            expand(s_TC, y_TH, self.tokens, self.second.shared)

    def second_back(
        self, dy_TH: Tensor, dh_QK: Tensor, h_QK: Callable[[], Tensor], s_TC: Tensor | None
    ) -> None:
        """Adds to dh of the experts' rows, and to gradients; collective.

        Args:
            h_QK: returns what `sum_second` was given.
        """
        if self.second is None:
            return
        assert s_TC is not None, "from `sum_second`"
        runs, own, shared = self.journey.runs, self.second.own, self.second.shared
        add_gradients(s_TC, dy_TH, self.tokens, shared)
        ds_TC = shrink(dy_TH, self.tokens, shared, self.second.width)
        ds_QC = self._there(scale(ds_TC, self.tokens, self.second))
        add_gradients(ds_QC, h_QK(), runs, own)
        expand(ds_QC, dh_QK, runs, own)

    def _there(self, columns_TC: Tensor) -> Tensor:
        return self.journey.there(self.rows.spread(columns_TC))

    def _back(self, columns_QC: Tensor) -> Tensor:
        return self.rows.sum(self.journey.back(columns_QC))
