"""What runs the parts of the frozen backbone that are not GEMMs: norm, rotation, SwiGLU, loss."""

from __future__ import annotations

import functools

import torch

from tlora_megatron.ops.kernel_choice import forced_kernels, triton_problem


def runs_triton(x: torch.Tensor) -> bool:
    """Whether a tensor gets the Triton kernels: on GPUs, unless `TLORA_KERNELS=torch`."""
    return x.is_cuda and _device_runs_triton(x.device, forced_kernels() == "torch")


@functools.cache
def _device_runs_triton(device: torch.device, forced_torch: bool) -> bool:
    return not forced_torch and triton_problem(device) is None
