"""Helpers of the frozen backbone's parts that are not GEMMs: norm, rotation, attention, SwiGLU.

Each part has two forms: one that autograd differentiates, and a `*_vjp`, which returns the result
and its vector-Jacobian product as a function. The second costs the host no graph, node or hook. Its
caller must call the function and then drop it, because it holds what is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

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
