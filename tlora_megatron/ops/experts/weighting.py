"""The activation of experts' rows, weighed by the router, and its way back.

    w * silu(gate) * up,    or of gpt-oss    w * (up + 1) * gate * sigmoid(alpha * gate)

gpt-oss limits gate from above, and up on both sides, before that; a value behind its limit has no
gradient.

Shapes: Q rows, I features inside an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlora_megatron.model.experts import ClampedGlu
from tlora_megatron.ops.frozen.swiglu import swiglu_reference, swiglu_vjp
from tlora_megatron.ops.lora.kernel_choice import runs_triton


def weighted_glu(inner_QI: Tensor, weights_Q: Tensor, glu: ClampedGlu | None) -> Tensor:
    """Returns the weighed activation `[Q, I]`.

    Args:
        inner_QI: gate and up side by side, `[Q, 2 I]`.
        glu: gpt-oss' activation; None = SwiGLU.
    """
    if glu is None:
        return weighted_swiglu(inner_QI, weights_Q)
    return _weighted(clamped_glu_reference(inner_QI, glu), weights_Q)


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
    if glu is None:
        return weighted_swiglu_back(grad_QI, inner_QI, weights_Q, with_result=with_result)
    hidden_QI = clamped_glu_reference(inner_QI, glu)
    dweights_Q = (grad_QI.float() * hidden_QI.float()).sum(-1)
    result = _weighted(hidden_QI, weights_Q) if with_result else None
    return _clamped_glu_back(_weighted(grad_QI, weights_Q), inner_QI, glu), dweights_Q, result


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


def weighted_swiglu(inner_QI: Tensor, weights_Q: Tensor) -> Tensor:
    """Returns `w * silu(gate) * up` `[Q, I]`.

    Args:
        inner_QI: gate and up side by side, `[Q, 2 I]`.
    """
    if runs_triton(inner_QI) and len(inner_QI):
        from tlora_megatron.ops.experts.triton import rows

        return rows.weighted_swiglu(inner_QI, weights_Q)
    return _weighted(swiglu_reference(inner_QI), weights_Q)


def weighted_swiglu_back(
    grad_QI: Tensor, inner_QI: Tensor, weights_Q: Tensor, *, with_result: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of gate and up `[Q, 2 I]`, and of the weights, fp32 `[Q]`.

    Args:
        with_result: the third value is `weighted_swiglu` then, else None.
    """
    if runs_triton(inner_QI) and len(inner_QI):
        from tlora_megatron.ops.experts.triton import rows

        return rows.weighted_swiglu_back(grad_QI, inner_QI, weights_Q, with_result=with_result)
    hidden_QI, back = swiglu_vjp(inner_QI)
    dweights_Q = (grad_QI.float() * hidden_QI.float()).sum(-1)
    result = _weighted(hidden_QI, weights_Q) if with_result else None
    return back(_weighted(grad_QI, weights_Q)), dweights_Q, result


def _weighted(x: Tensor, weights_Q: Tensor) -> Tensor:
    return (x.float() * weights_Q.float()[:, None]).to(x.dtype)
