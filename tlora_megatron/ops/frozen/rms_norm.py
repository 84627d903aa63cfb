"""RMSNorm with a frozen weight, together with the residual stream around it.

Semantics, as Hugging Face's Llama: `y = round(x / rms(x)) * weight`, statistics in fp32, `round` to
the dtype of x. The norms of torch and of Transformer Engine round once, behind the weight, which
may be held less 1 (`NormWeight`). A block reads the residual stream twice, as it is and normalised;
both gradients come back to the same tensor. So both outputs come from one function, whose backward
adds the two gradients in the pass that computes one of them. No gradient of the weight.

The residual stream may be fp32 while weights, what is added to it and what is normalised are of
half the width (`--fp32-residual-connection`): sums and gradients of the stream then stay fp32.

Shapes: H features in the last dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tlora_megatron.ops.frozen.parts import NormWeight, Vjp, vjp_by_autograd
from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.quantised.rows import GROUP, OneScale
from tlora_megatron.ops.quantised.weight import QuantWeight


def rms_norm_reference(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition, differentiable."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps) * weight_H


def rms_norm_once_reference(x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
    """The definition of a norm that rounds once, differentiable in x."""
    weight_H, eps, zero_centered, _ = weight
    if not zero_centered and weight_H.dtype == x.dtype:
        return F.rms_norm(x, weight_H.shape, weight_H, eps)  # fp32 inside, in a pass
    # 1 + weight would be rounded in the weight's own dtype.
    return F.rms_norm(x.float(), weight_H.shape, weight_H.float() + zero_centered, eps).to(x.dtype)


def norm_reference(x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
    """The definition of either norm, differentiable in x."""
    dtype = normed_dtype(x, weight.weight_H)
    if weight.rounds_once:
        return rms_norm_once_reference(x, weight).to(dtype)
    return F.rms_norm(x, (x.shape[-1],), eps=weight.eps).to(dtype) * weight.weight_H


def normed_dtype(stream: torch.Tensor, weight_H: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a norm's output: the stream's, or the weight's where that is fp32."""
    return weight_H.dtype if stream.dtype == torch.float32 else stream.dtype


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `residual + x`, rounded to their dtype, or x, as it is and normalised: `[..., H]`."""
    if runs_triton(x):
        return _FusedRMSNorm.apply(x, residual, NormWeight(weight_H, eps, rounds_once=False))
    total = x if residual is None else residual + x
    return total, rms_norm_reference(total, weight_H, eps)


class Beside(NamedTuple):
    """Quantised linears beside a norm, or None.

    For them it leaves FP8 codes (`handed_rows`), or the largest magnitude (`take_largest`).
    """

    column: QuantWeight | OneScale | None = None
    """Reads the norm."""
    row: QuantWeight | OneScale | None = None
    """Made x, and reads the gradient that the product returns."""


def add_rms_norm_vjp(
    x: torch.Tensor, residual: torch.Tensor | None, weight: NormWeight, beside: Beside | None = None
) -> tuple[torch.Tensor, torch.Tensor, Vjp]:
    """Returns what `add_rms_norm` does, of either norm, and its vector-Jacobian product.

    The product takes the gradients of both outputs, None for a sum that nobody reads, and returns
    that of x, which is also the residual's.
    """
    if not runs_triton(x):
        total = x if residual is None else residual + x
        both, vjp = vjp_by_autograd(lambda t: (t, norm_reference(t, weight)), total)
        return *both, vjp
    from tlora_megatron.ops.frozen.rms_norm_triton import launch_backward, launch_forward

    column, row = beside or (None, None)
    if x.dim() != 2 or x.shape[1] < GROUP:  # no codes of narrow rows
        column = row = None
    if residual is not None and residual.dtype != x.dtype:  # nor of a stream that is rounded
        row = None
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    dtype = normed_dtype(x if residual is None else residual, weight.weight_H)
    out = torch.empty_like(x, dtype=dtype)
    total, rstd = launch_forward(x, residual, weight, out, column)

    def back(dtotal: torch.Tensor | None, dy: torch.Tensor) -> torch.Tensor:
        dtotal = None if dtotal is None else dtotal.contiguous()
        return launch_backward(dy.contiguous(), dtotal, total, weight, rstd, row)

    return total, out, back


def norm_into(out: torch.Tensor, x: torch.Tensor, weight: NormWeight) -> None:
    """Writes the norm of x to memory that is there, to the bit what `add_rms_norm_vjp` gave."""
    if not runs_triton(x):
        out.copy_(norm_reference(x, weight))
        return
    from tlora_megatron.ops.frozen.rms_norm_triton import launch_forward

    launch_forward(x.contiguous(), None, weight, out)


class _FusedRMSNorm(torch.autograd.Function):
    """The sum and its norm; saves the sum (x itself without a residual) and a number a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: NormWeight,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.frozen.rms_norm_triton import launch_forward

        ctx.set_materialize_grads(False)
        residual = None if residual is None else residual.contiguous()
        x, ctx.weight = x.contiguous(), weight
        out = torch.empty_like(x)
        total, rstd = launch_forward(x, residual, weight, out)
        ctx.save_for_backward(total, rstd)
        return total, out

    @staticmethod
    def backward(
        ctx: Any, dtotal: torch.Tensor | None, dy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        from tlora_megatron.ops.frozen.rms_norm_triton import launch_backward

        total, rstd = ctx.saved_tensors
        dx = dtotal
        if dy is not None:
            dtotal = None if dtotal is None else dtotal.contiguous()
            dx = launch_backward(dy.contiguous(), dtotal, total, ctx.weight, rstd)
        return dx, dx if ctx.needs_input_grad[1] else None, None
