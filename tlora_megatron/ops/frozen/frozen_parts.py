"""What the parts of the frozen backbone that are not GEMMs have in common: norm, rotation, SwiGLU.

Each has two forms: one that autograd differentiates, and a `*_vjp`, which returns the result and
its vector-Jacobian product as a function. The second costs the host no graph, node or hook; who
calls it walks back himself and lets go of the function, which holds what is saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from tlora_megatron.ops.lora.kernel_choice import forced_kernels, triton_problem

Vjp = Callable[..., Any]
"""From the results' gradients to those of the inputs; called once."""
End = torch.Tensor | GradientEdge
"""Where a graph ends: a tensor whose memory is needed anyway, or what leads back from it alone."""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether a tensor gets the Triton kernels: on GPUs, unless `TLORA_KERNELS=torch`."""
    return x.is_cuda and _device_runs_triton(x.device, forced_kernels() == "torch")


@functools.cache
def _device_runs_triton(device: torch.device, forced_torch: bool) -> bool:
    return not forced_torch and triton_problem(device) is None


def vjp_by_autograd(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, Vjp]:
    """A differentiable function's results, and the way back through a graph of its own.

    For what has no kernels here; keeps the inputs' memory until then.
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
    """`torch.autograd.grad`, or `backward` without inputs, and none of their checks, which took 18
    of the 76 us that a half layer's cuts cost the host, there and back (a server CPU's core)."""
    return Variable._execution_engine.run_backward(
        outputs, grads, False, False, inputs, allow_unreachable=True, accumulate_grad=not inputs
    )
