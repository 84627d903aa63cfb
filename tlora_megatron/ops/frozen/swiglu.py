"""SwiGLU over gate and up that lie side by side: `silu(gate) * up`.

Shapes: F features of the gate; x is `[..., 2 F]`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tlora_megatron.ops.frozen.frozen_parts import Vjp, runs_triton, vjp_by_autograd


def swiglu_reference(x: torch.Tensor) -> torch.Tensor:
    """The definition, differentiable."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up`, `[..., F]`; on GPUs in fp32, rounded once."""
    return _FusedSwiGLU.apply(x) if runs_triton(x) else swiglu_reference(x)


def swiglu_vjp(x: torch.Tensor) -> tuple[torch.Tensor, Vjp]:
    """Returns `swiglu` and its vector-Jacobian product, which holds x."""
    if not runs_triton(x):
        return vjp_by_autograd(swiglu_reference, x)
    from tlora_megatron.ops.frozen.triton_swiglu import launch_backward, launch_forward

    x = x.contiguous()
    return launch_forward(x), lambda dy: launch_backward(dy.contiguous(), x)


class _FusedSwiGLU(torch.autograd.Function):
    """Saves x, whose gradient is one pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.frozen.triton_swiglu import launch_forward

        x = x.contiguous()
        ctx.save_for_backward(x)
        return launch_forward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        from tlora_megatron.ops.frozen.triton_swiglu import launch_backward

        return launch_backward(dy.contiguous(), *ctx.saved_tensors)
