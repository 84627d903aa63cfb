"""Kernels of `ops.frozen.swiglu`: gate and up are read where they lie, side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.warm_kernel import WarmKernel

_BLOCK = 1024
"""Columns of a thread block: 8 a thread, one load of 16 bytes each of gate and up."""
_WARPS = 4


@triton.jit
def product(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """`silu(gate) * up`."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def gradients(grad: tl.tensor, gate: tl.tensor, up: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Gradients of gate and up."""
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu


@triton.jit
def _forward_kernel(
    x: tl.tensor,  # [T, 2 * WIDTH]
    y: tl.tensor,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = x + row * 2 * WIDTH + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + columns, product(gate, up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy: tl.tensor,  # [T, WIDTH]
    x: tl.tensor,  # [T, 2 * WIDTH]
    dx: tl.tensor,  # as x
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    begin = row * 2 * WIDTH + columns
    grad = tl.load(dy + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + begin, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + begin + WIDTH, mask=inside, other=0.0).to(tl.float32)
    dgate, dup = gradients(grad, gate, up)
    tl.store(dx + begin, dgate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + begin + WIDTH, dup.to(dx.dtype.element_ty), mask=inside)


_forward = WarmKernel(_forward_kernel)
_backward = WarmKernel(_backward_kernel)


def launch_forward(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of contiguous `[..., 2 F]`."""
    width = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], width)
    blocks = -(-width // _BLOCK) * (y.numel() // width)
    _forward.launch(blocks, (x, y), (), (width, _BLOCK), num_warps=_WARPS)
    return y


def launch_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of contiguous `[..., 2 F]`."""
    width = x.shape[-1] // 2
    dx = torch.empty_like(x)
    blocks = -(-width // _BLOCK) * (dy.numel() // width)
    _backward.launch(blocks, (dy, x, dx), (), (width, _BLOCK), num_warps=_WARPS)
    return dx
