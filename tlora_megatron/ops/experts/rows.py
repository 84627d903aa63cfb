"""A micro-batch's rows at routed experts: the router, their order, and the weights of results.

Semantics of the router, for a row t with the experts C(t) of the `top_k` largest scores:

    l[t]    = x[t] W^T                              in x's dtype
    p[t]    = softmax(l[t])                         in fp32, over all experts
    w[t, e] = p[t, e] / sum over C(t) of p[t], or p[t, e]    for e in C(t)

gpt-oss: w[t] = softmax of l[t] = x[t] W^T + b over C(t) alone, those of the largest logits.

The router is frozen, not cut off: `dx` through the weights belongs to the gradient, the choice has
none. A row's experts are given in ascending order, which is the order of all sums over them.

A row lies expert by expert, once for every expert that it meets. Rows of a packed micro-batch lie
adapter by adapter, and so they do inside an expert.

The activation, weighed:

    w * silu(gate) * up,    or of gpt-oss    w * (up + 1) * gate * sigmoid(alpha * gate)

gpt-oss limits gate from above, and up on both sides, before that; a value behind its limit has no
gradient.

Shapes: T rows, H hidden features, E experts, K of them a row, S adapters, R = T
K, Q rows, I features inside an expert.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.model.spec import ClampedGlu, ExpertsSpec
from tlora_megatron.ops.experts.branch import PlacedRows
from tlora_megatron.ops.frozen.parts import Vjp, swiglu_reference, swiglu_vjp
from tlora_megatron.ops.lora.kernel_choice import runs_triton


class Routing(NamedTuple):
    """The experts of every row, and what weighs them."""

    experts_TK: Tensor
    """int64, ascending in each row."""
    weights_TK: Tensor
    """fp32, or the dtype of the logits where transformers rounds to it."""


def route_reference(
    x_TH: Tensor, weight_EH: Tensor, spec: ExpertsSpec, bias_E: Tensor | None = None
) -> Routing:
    """The definition, differentiable in x.

    Args:
        bias_E: of gpt-oss' router.
    """
    logits_TE = F.linear(x_TH, weight_EH, bias_E)
    if spec.glu is not None:  # gpt-oss: a softmax over the chosen logits, in their dtype
        chosen_TK, experts_TK = logits_TE.topk(spec.top_k, dim=-1)
        weights_TK = chosen_TK.softmax(-1, dtype=chosen_TK.dtype)
    else:
        scores_TE = logits_TE.softmax(-1, dtype=torch.float32)
        weights_TK, experts_TK = scores_TE.topk(spec.top_k, dim=-1)
        if spec.normalizes:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        if not spec.keeps_fp32:
            weights_TK = weights_TK.to(x_TH.dtype)
    experts_TK, order_TK = experts_TK.sort(-1)
    return Routing(experts_TK, weights_TK.gather(-1, order_TK))


def route_vjp(
    x_TH: Tensor, weight_EH: Tensor, spec: ExpertsSpec, bias_E: Tensor | None = None
) -> tuple[Routing, Vjp]:
    """Returns the routing, and the way back: dx `[T, H]` from the weights' gradient `[T, K]`.

    It saves `[T, K]` where weights are normalised, else the scores `[T, E]`; never x.
    """
    routing = route_reference(x_TH, weight_EH, spec, bias_E)
    experts_TK, weights_TK = routing
    # The weights are a softmax over the row's own experts, or a part of one over all of them.
    kept_TK = weights_TK.float()
    dtype, num_experts = x_TH.dtype, spec.num_experts
    scores_TE = None
    if not spec.normalizes:
        scores_TE = F.linear(x_TH, weight_EH).softmax(-1, dtype=torch.float32)

    def vjp(dweights_TK: Tensor) -> Tensor:
        d_TK = dweights_TK.float()
        mean_T1 = (d_TK * kept_TK).sum(-1, keepdim=True)
        if scores_TE is None:
            dlogits_TE = d_TK.new_zeros(len(d_TK), num_experts)
            dlogits_TE.scatter_(1, experts_TK, kept_TK * (d_TK - mean_T1))
        else:
            dlogits_TE = -mean_T1 * scores_TE
            dlogits_TE.scatter_add_(1, experts_TK, kept_TK * d_TK)
        return dlogits_TE.to(dtype) @ weight_EH

    return routing, vjp


class ExpertRows(NamedTuple):
    """Where a micro-batch's rows lie for the experts; a value of one layer's call."""

    rows_R: Tensor
    """int64: the row of the micro-batch at each place."""
    choice_R: Tensor
    """int64: its index among all T K choices, row by row."""
    places_TK: Tensor
    """int64: the place of each row at each of its experts."""
    counts_ES: Tensor
    """int64: places of each adapter's rows at each expert, the null slot last; with one column,
    places of each expert."""

    def spread(self, x_TH: Tensor) -> Tensor:
        """Returns a row's values at all of its places, `[R, H]`."""
        if runs_triton(x_TH) and len(self.rows_R):
            return kernels().spread_rows(x_TH, self.rows_R)
        return x_TH[self.rows_R]

    def placed(self, x_TH: Tensor) -> PlacedRows:
        """Returns the same, not copied."""
        return PlacedRows(x_TH.contiguous(), self.rows_R)

    def pick(self, weights_TK: Tensor) -> Tensor:
        """Returns the value of each choice at its place, `[R]`."""
        return weights_TK.flatten()[self.choice_R]

    def sum(self, y_RH: Tensor) -> Tensor:
        """Returns the sum over a row's places `[T, H]`: in fp32, by ascending expert."""
        if runs_triton(y_RH) and len(y_RH):
            return kernels().sum_rows(y_RH, self.places_TK)
        total_TH = y_RH[self.places_TK[:, 0]].float()
        for choice in range(1, self.places_TK.shape[1]):
            total_TH += y_RH[self.places_TK[:, choice]]
        return total_TH.to(y_RH.dtype)


class RowSlots(NamedTuple):
    """The adapters of a micro-batch's rows."""

    slots_T: Tensor
    """int64: the slot of each row."""
    num_slots: int
    """Slots, the null slot left out."""


def sort_rows(experts_TK: Tensor, num_experts: int, slots: RowSlots | None = None) -> ExpertRows:
    """Orders a micro-batch's rows by expert; nothing waits for the device.

    Args:
        experts_TK: int64, ascending in each row.
        slots: counts are by adapter; None = they are not.
    """
    # A sort of short keys takes fewer passes on a GPU.
    choice_R = experts_TK.flatten().to(torch.int16).argsort(stable=True)
    places_R = torch.empty_like(choice_R)
    places_R[choice_R] = torch.arange(len(choice_R), device=choice_R.device)
    rows_R = choice_R // experts_TK.shape[1]
    counts_ES = _count(experts_TK, num_experts, slots)
    return ExpertRows(rows_R, choice_R, places_R.view_as(experts_TK), counts_ES)


def kernels() -> Any:
    """Returns the module of kernels: triton is only there on machines with a GPU."""
    from tlora_megatron.ops.experts import triton_rows

    return triton_rows


def _count(experts_TK: Tensor, num_experts: int, slots: RowSlots | None) -> Tensor:
    columns, pairs_TK = 1, experts_TK
    if slots is not None:
        columns = slots.num_slots + 1
        pairs_TK = experts_TK * columns + slots.slots_T[:, None]
    pairs_R = pairs_TK.flatten()
    counts = pairs_R.new_zeros(num_experts * columns)
    return counts.scatter_add_(0, pairs_R, torch.ones_like(pairs_R)).view(num_experts, columns)


def weighted_glu(inner_QI: Tensor, weights_Q: Tensor, glu: ClampedGlu | None) -> Tensor:
    """Returns the weighed activation `[Q, I]`.

    Args:
        inner_QI: gate and up side by side, `[Q, 2 I]`.
        glu: gpt-oss' activation; None = SwiGLU.
    """
    if glu is not None:
        return _weighted(clamped_glu_reference(inner_QI, glu), weights_Q)
    if runs_triton(inner_QI) and len(inner_QI):
        return kernels().weighted_swiglu(inner_QI, weights_Q)
    return _weighted(swiglu_reference(inner_QI), weights_Q)


def weighted_glu_back(
    grad_QI: Tensor,
    inner_QI: Tensor,
    weights_Q: Tensor,
    glu: ClampedGlu | None,
    *,
    with_result: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of gate and up `[Q, 2 I]`, and of the weights, fp32 `[Q]`.

    Args:
        with_result: the third value is `weighted_glu` then, else None.
    """
    if glu is not None:
        hidden_QI = clamped_glu_reference(inner_QI, glu)
        back: Vjp = functools.partial(_clamped_glu_back, inner_QI=inner_QI, glu=glu)
    elif runs_triton(inner_QI) and len(inner_QI):
        kernel = kernels().weighted_swiglu_back
        return kernel(grad_QI, inner_QI, weights_Q, with_result=with_result)
    else:
        hidden_QI, back = swiglu_vjp(inner_QI)
    dweights_Q = (grad_QI.float() * hidden_QI.float()).sum(-1)
    result = _weighted(hidden_QI, weights_Q) if with_result else None
    return back(_weighted(grad_QI, weights_Q)), dweights_Q, result


def clamped_glu_reference(inner_QI: Tensor, glu: ClampedGlu) -> Tensor:
    """gpt-oss' activation `[Q, I]` in fp32, rounded once; differentiable."""
    gate, up = inner_QI.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=glu.limit), up.clamp(min=-glu.limit, max=glu.limit)
    return ((up + 1) * (gate * torch.sigmoid(gate * glu.alpha))).to(inner_QI.dtype)


def _clamped_glu_back(grad_QI: Tensor, inner_QI: Tensor, glu: ClampedGlu) -> Tensor:
    gate, up = inner_QI.float().chunk(2, dim=-1)
    low, among = gate.clamp(max=glu.limit), up.clamp(min=-glu.limit, max=glu.limit)
    sigmoid, grad = torch.sigmoid(low * glu.alpha), grad_QI.float()
    dup = grad * low * sigmoid * (up == among)
    slope = sigmoid * (1 + glu.alpha * low * (1 - sigmoid))
    dgate = grad * (among + 1) * slope * (gate == low)
    return torch.cat([dgate, dup], dim=-1).to(inner_QI.dtype)


def _weighted(x: Tensor, weights_Q: Tensor) -> Tensor:
    return (x.float() * weights_Q.float()[:, None]).to(x.dtype)
