"""SwiGLU over gate and up that lie side by side: `silu(gate) * up`.

Shapes: F features of the gate; x is `[..., 2 F]`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tlora_megatron.ops.frozen.parts import Vjp, vjp_by_autograd
from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.quantised.weight import QuantWeight


def swiglu_reference(x: torch.Tensor) -> torch.Tensor:
    """The definition, differentiable."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up`, `[..., F]`; on GPUs in fp32, rounded once."""
    return _FusedSwiGLU.apply(x) if runs_triton(x) else swiglu_reference(x)


def swiglu_vjp(
    x: torch.Tensor,
    row: QuantWeight | None = None,
    column: QuantWeight | None = None,
) -> tuple[torch.Tensor, Vjp]:
    """Returns `swiglu` and its vector-Jacobian product, which holds x.

    Args:
        row: the quantised linear behind: the result carries its FP8 codes (`handed_rows`).
        column: the quantised linear before, for which the product's result carries them.
    """
    if not runs_triton(x):
        return vjp_by_autograd(swiglu_reference, x)
    from tlora_megatron.ops.frozen.swiglu_triton import launch_backward, launch_forward

    x = x.contiguous()
    if row is None and column is None:
        return launch_forward(x), lambda dy: launch_backward(dy.contiguous(), x)
    from tlora_megatron.ops.frozen import swiglu_triton as coded

    width = x.shape[-1] // 2
    y = (
        coded.forward_with_codes(x, row)
        if row and width <= coded.FORWARD_COLUMNS
        else launch_forward(x)
    )
    if column is None or width > coded.BACKWARD_COLUMNS:
        return y, lambda dy: launch_backward(dy.contiguous(), x)
    return y, lambda dy: coded.backward_with_codes(dy.contiguous(), x, column)


class _FusedSwiGLU(torch.autograd.Function):
    """Saves x, whose gradient is one pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.frozen.swiglu_triton import launch_forward

        x = x.contiguous()
        ctx.save_for_backward(x)
        return launch_forward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        from tlora_megatron.ops.frozen.swiglu_triton import launch_backward

        return launch_backward(dy.contiguous(), *ctx.saved_tensors)
