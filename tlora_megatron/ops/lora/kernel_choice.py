"""Chooses the implementation of the multi-adapter linear for a device, and says why.

`TLORA_KERNELS` forces one; otherwise the fastest that runs here. Importing this imports none.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from tlora_megatron.ops.lora.linear_ops import LinearOps

logger = logging.getLogger(__name__)

Kernels = Literal["torch", "triton", "cuda"]
VARIABLE = "TLORA_KERNELS"
_HALF = (torch.bfloat16, torch.float16)
_TRITON_CAPABILITY = (8, 0)
"""From here on tensor cores take bf16 and copies to shared memory are asynchronous."""
_CUDA_MAJOR = 9
"""Hopper: csrc/ uses its wgmma and TMA, which neither older nor newer GPUs have."""


class KernelChoice(NamedTuple):
    """The implementation chosen for a device and dtype."""

    name: Kernels
    reason: str
    """A clause that can be printed after the name."""


def forced_kernels() -> Kernels | None:
    """The implementation that `TLORA_KERNELS` names, None where it is unset or empty.

    Raises:
        ValueError: if it names none.
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return None
    if value not in get_args(Kernels):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(get_args(Kernels))}, got {value!r}")
    return cast(Kernels, value)


def kernel_choice(device: torch.device, dtype: torch.dtype) -> KernelChoice:
    """Chooses the implementation; builds the CUDA extension where that is the candidate.

    Raises:
        ValueError: if `TLORA_KERNELS` is invalid or names one that cannot run here.
    """
    forced = forced_kernels()
    if forced == "torch":
        return KernelChoice("torch", f"{VARIABLE}=torch")
    if forced is not None:
        problem = problem_of(forced, device, dtype)
        if problem is not None:
            raise ValueError(f"{VARIABLE} must name kernels that run here, got {forced}: {problem}")
        return KernelChoice(forced, f"{VARIABLE}={forced}")
    return _automatic(device, dtype)


def choose_ops(device: torch.device, dtype: torch.dtype) -> LinearOps:
    """Returns the implementation that `kernel_choice` names, one object a process."""
    return _make(kernel_choice(device, dtype).name)


def runs_triton(x: Tensor) -> bool:
    """Returns True if a tensor gets the Triton kernels: on GPUs, unless `TLORA_KERNELS=torch`."""
    return x.is_cuda and _device_runs_triton(x.device, forced_kernels() == "torch")


@functools.cache
def _device_runs_triton(device: torch.device, forced_torch: bool) -> bool:
    return not forced_torch and triton_problem(device) is None


def runs_cuda(x: Tensor) -> bool:
    """Returns True if a tensor gets the CUDA kernels; may build the CUDA extension."""
    return x.is_cuda and _device_runs_cuda(x.device, x.dtype, forced_kernels())


@functools.cache
def _device_runs_cuda(device: torch.device, dtype: torch.dtype, forced: Kernels | None) -> bool:
    return kernel_choice(device, dtype).name == "cuda"


def problem_of(name: Kernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why an implementation cannot run, None where it can; may build the CUDA extension."""
    if name == "torch":
        return None
    problem = triton_problem(device) or _dtype_problem(dtype)
    if name == "triton" or problem:
        return problem
    return _cuda_dtype_problem(dtype) or cuda_problem(device)


def triton_problem(device: torch.device) -> str | None:
    """Returns why Triton kernels cannot run on the device in any dtype; None where they can."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _TRITON_CAPABILITY:
            return f"compute capability must be at least 8.0, got {_dotted(capability)}"
    elif not _interprets():
        return "no GPU"
    return _triton_installation_problem()


def cuda_problem(device: torch.device) -> str | None:
    """Returns why the CUDA extension cannot run on the device, None where it can; may build it."""
    if device.type != "cuda":
        return "no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != _CUDA_MAJOR:
        return f"compute capability must be 9.x, got {_dotted(capability)}"
    return _extension_problem()


def _automatic(device: torch.device, dtype: torch.dtype) -> KernelChoice:
    if device.type != "cuda":
        return KernelChoice("torch", "no GPU")
    problem = _dtype_problem(dtype) or triton_problem(device)
    if problem:
        if _triton_installation_problem() == problem:
            _warn_once(
                f"the torch path is used, which is slower than the Triton kernels: {problem}"
            )
        return KernelChoice("torch", problem)
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != _CUDA_MAJOR:
        return KernelChoice("triton", f"compute capability {_dotted(capability)}")
    problem = _cuda_dtype_problem(dtype)
    if problem is not None:
        return KernelChoice("triton", problem)
    problem = _extension_problem()
    if problem is None:
        return KernelChoice("cuda", f"compute capability {_dotted(capability)}, extension loaded")
    _warn_once(f"the Triton kernels are used, the CUDA extension is not available: {problem}")
    return KernelChoice("triton", f"no CUDA extension: {problem}")


def _dtype_problem(dtype: torch.dtype) -> str | None:
    if dtype in _HALF:
        return None
    return f"dtype must be bfloat16 or float16, got {_name(dtype)}"


def _cuda_dtype_problem(dtype: torch.dtype) -> str | None:
    return None if dtype == torch.bfloat16 else f"dtype must be bfloat16, got {_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_installation_problem() -> str | None:
    compilers = (os.environ.get("CC", ""), "clang", "gcc")
    if not _interprets() and not any(map(shutil.which, compilers)):
        return "triton needs a C compiler; install gcc, or name one with CC"
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken installation raises anything
        return f"triton cannot be imported ({error}); pip install triton"
    return None


@functools.cache
def _extension_problem() -> str | None:
    from tlora_megatron.ops.kernel_build import ExtensionUnavailable, load_extension

    try:
        load_extension()
    except ExtensionUnavailable as error:
        return str(error)
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


@functools.cache
def _make(name: Kernels) -> LinearOps:
    if name == "cuda":
        from tlora_megatron.ops.lora.cuda_ops import CudaOps

        return CudaOps(fallback=_make("triton"))
    if name == "triton":
        from tlora_megatron.ops.lora.triton_ops import TritonOps

        return TritonOps()
    from tlora_megatron.ops.lora.torch_ops import TorchOps

    return TorchOps()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
