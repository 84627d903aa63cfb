"""The frozen router of a layer with experts, as transformers computes it, without autograd.

Semantics, for a row t with the experts C(t) of the `top_k` largest scores:

    l[t]    = x[t] W^T                              in x's dtype
    p[t]    = softmax(l[t])                         in fp32, over all experts
    w[t, e] = p[t, e] / sum over C(t) of p[t], or p[t, e]    for e in C(t)

gpt-oss: w[t] = softmax of l[t] = x[t] W^T + b over C(t) alone, those of the largest logits.

The router is frozen, not cut off: `dx` through the weights belongs to the gradient, the choice has
none. A row's experts are given in ascending order, which is the order of all sums over them.

Shapes: T rows, H hidden features, E experts, K of them a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.model.experts import ExpertsSpec
from tlora_megatron.ops.frozen.frozen_parts import Vjp


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
    if spec.glu is not None:
        return _route_by_logits(F.linear(x_TH, weight_EH, bias_E), spec)
    scores_TE = F.linear(x_TH, weight_EH).softmax(-1, dtype=torch.float32)
    weights_TK, experts_TK = scores_TE.topk(spec.top_k, dim=-1)
    if spec.normalizes:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    if not spec.keeps_fp32:
        weights_TK = weights_TK.to(x_TH.dtype)
    experts_TK, order_TK = experts_TK.sort(-1)
    return Routing(experts_TK, weights_TK.gather(-1, order_TK))


def _route_by_logits(logits_TE: Tensor, spec: ExpertsSpec) -> Routing:
    """gpt-oss: weights are a softmax over the chosen logits, in their dtype."""
    chosen_TK, experts_TK = logits_TE.topk(spec.top_k, dim=-1)
    weights_TK = chosen_TK.softmax(-1, dtype=chosen_TK.dtype)
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
