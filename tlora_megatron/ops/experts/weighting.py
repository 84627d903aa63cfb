"""SwiGLU of experts' rows, weighed by the router: `w * silu(gate) * up`, and its way back.

Shapes: Q rows, I features inside an expert.
"""

from __future__ import annotations

from torch import Tensor

from tlora_megatron.ops.frozen.swiglu import swiglu_reference, swiglu_vjp
from tlora_megatron.ops.lora.kernel_choice import runs_triton


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
