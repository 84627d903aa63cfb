"""Parts of the frozen backbone: products, SwiGLU, weights of norms, and forms without autograd.

Each part has two forms: one that autograd differentiates, and a `*_vjp`, which returns the result
and its vector-Jacobian product as a function. The second costs the host no graph, node or hook. Its
caller must call the function and then drop it, because it holds what is saved.

Shapes: T rows, K features in, N features out, F features of the gate, x is `[..., 2 F]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.lora.kernel_choice import runs_cuda, runs_triton
from tlora_megatron.ops.lora.linear_ops import Base, base_dgrad, base_product
from tlora_megatron.ops.quantised.rows import OneScale
from tlora_megatron.ops.quantised.weight import QuantWeight

Vjp = Callable[..., Any]
"""From the results' gradients to those of the inputs; called once."""
End = torch.Tensor | GradientEdge
"""The end of a graph: a tensor whose memory is needed anyway, or its graph edge alone."""


def vjp_by_autograd(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, Vjp]:
    """Returns a function's results, and its vector-Jacobian product by a graph of its own.

    For functions without kernels here. The product keeps the inputs' memory until it is called.
    """
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    with torch.enable_grad():
        results = function(*leaves)
    is_single = isinstance(results, torch.Tensor)
    outputs = (results,) if is_single else tuple(results)

    def vjp(*grads: torch.Tensor | None) -> Any:
        read = (pair for pair in zip(outputs, grads, strict=True) if pair[1] is not None)
        ends, given = zip(*read, strict=True)
        found = run_backward(ends, given, leaves)
        return found[0] if len(found) == 1 else found

    detached = tuple(x.detach() for x in outputs)
    return detached[0] if is_single else detached, vjp


def run_backward(
    outputs: tuple[End, ...],
    grads: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...] = (),
) -> Any:
    """Runs `torch.autograd.grad`, or `backward` without inputs, without their checks.

    The checks took 18 of the 76 us that the graph's ends of a half layer cost the host, both ways
    (one core of a server's CPU).
    """
    return Variable._execution_engine.run_backward(
        outputs, grads, False, False, inputs, allow_unreachable=True, accumulate_grad=not inputs
    )


def frozen_product(
    x_TK: torch.Tensor, base: Base, bias_N: torch.Tensor | None, exactness: Exactness | None
) -> torch.Tensor:
    """Returns `x W^T + b`."""
    if exactness is None or not isinstance(base, torch.Tensor) or not has_own_gemm(x_TK, base):
        return base_product(base, x_TK, bias_N)
    return _own_gemm(x_TK, base, exactness, bias_N, transposed=True)


def frozen_dgrad(dy_TN: torch.Tensor, base: Base, exactness: Exactness | None) -> torch.Tensor:
    """Returns `dy W`."""
    if exactness is None or not isinstance(base, torch.Tensor) or not has_own_gemm(dy_TN, base):
        return base_dgrad(base, dy_TN)
    return _own_gemm(dy_TN, base, exactness, None, transposed=False)


def has_own_gemm(x: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """True if the GEMM of the adapted linears can compute a product: cuBLAS, which computes it
    otherwise, divides long sums by the number of rows."""
    if not runs_cuda(x):
        return False
    from tlora_megatron.ops.lora.cuda_arguments import fit_gemm

    return fit_gemm(*weight_NK.shape)


def _own_gemm(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    exactness: Exactness,
    bias_N: torch.Tensor | None,
    *,
    transposed: bool,
) -> torch.Tensor:
    from tlora_megatron.ops.lora.cuda_arguments import gemm_tile
    from tlora_megatron.ops.lora.cuda_calls import gemm, multiprocessors

    out = x.new_empty(len(x), weight_NK.shape[0 if transposed else 1])
    tile = gemm_tile(exactness.row_budget, out.shape[1], multiprocessors(x.device) // 2)
    weight_NK = weight_NK.contiguous()
    gemm(x.contiguous(), weight_NK, out, tile, transposed=transposed, bias_N=bias_N)
    return out


class NormWeight(NamedTuple):
    """The frozen weight of a norm, and how the norm rounds."""

    weight_H: torch.Tensor
    eps: float
    zero_centered: bool = False
    """The weight is held less 1; such a norm rounds once."""
    rounds_once: bool = True
    """Behind the weight, and not before it too."""


class HeadNorms(NamedTuple):
    """Norms of single heads of queries and keys, which are equal but for the weights `[D]`."""

    query: NormWeight
    key: NormWeight


def swiglu_reference(x: torch.Tensor) -> torch.Tensor:
    """The definition, differentiable."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up`, `[..., F]`; on GPUs in fp32, rounded once."""
    return _FusedSwiGLU.apply(x) if runs_triton(x) else swiglu_reference(x)


def swiglu_vjp(
    x: torch.Tensor,
    row: QuantWeight | OneScale | None = None,
    column: QuantWeight | OneScale | None = None,
) -> tuple[torch.Tensor, Vjp]:
    """Returns `swiglu` and its vector-Jacobian product, which holds x.

    Args:
        row: the quantised linear behind: the result carries its FP8 codes (`handed_rows`), or its
            largest magnitude (`take_largest`).
        column: the quantised linear before, for which the product's result carries them.
    """
    if not runs_triton(x):
        return vjp_by_autograd(swiglu_reference, x)
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.frozen.swiglu_triton import launch_backward, launch_forward

    x = x.contiguous()
    return launch_forward(x, row), lambda dy: launch_backward(dy.contiguous(), x, column)


class _FusedSwiGLU(torch.autograd.Function):
    """Saves x, whose gradient is one pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        from tlora_megatron.ops.frozen.swiglu_triton import launch_forward

        x = x.contiguous()
        ctx.save_for_backward(x)
        return launch_forward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        from tlora_megatron.ops.frozen.swiglu_triton import launch_backward

        return launch_backward(dy.contiguous(), *ctx.saved_tensors)
