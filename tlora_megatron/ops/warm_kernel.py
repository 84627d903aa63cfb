"""Launches compiled Triton kernels without Triton's inspection of every argument.

`kernel[grid](...)` binds arguments by name, asks each what it would be specialised for, formats its
options as text and looks up the kernel by all of it: more time on the host than the launch itself,
eight times a layer (docs/measurements, host_time). Here a kernel is found by what can change, and
given addresses: of a tensor Triton's launcher asks the driver whether it may read it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

_ALIGNMENT = 16
"""Bytes: what Triton compiles pointers for, where they are so aligned."""


_MULTIPROCESSOR_WARPS = 32
"""Warps of a multiprocessor whose registers, 64 a thread, fit it, for blocks that stay."""
_CARVEOUT = 9
"""`CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`: percent of the most."""


class _Compiled(NamedTuple):
    """A kernel on one device, as `CompiledKernel` launches it."""

    run: Callable[..., None]
    function: int
    metadata: Any
    kernel: CompiledKernel
    """Kept: Triton 3.9 unloads the function of one that nobody holds."""


class WarmKernel:
    """A Triton kernel: tensors first, then numbers, then constants.

    Args:
        kernel: of `triton.jit` with every integer among its numbers in `do_not_specialize`: no
            value of one may be what it was compiled for.
        caches: it reads some memory again and again. Triton asks for as much shared memory as
            there is for a kernel that takes more than 48 KiB, and the L1 cache loses it.
    """

    def __init__(self, kernel: Any, *, caches: bool = False) -> None:
        self._kernel = kernel
        self._caches = caches
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def launch(
        self,
        grid: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[int, ...],
        *,
        num_warps: int,
        grid_y: int = 1,
    ) -> None:
        """Starts `grid * grid_y` programs on the current stream of the tensors' device."""
        device = tensors[0].device.index
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (device, num_warps, constants, *[tensor.dtype for tensor in tensors])
        found = self._compiled.get(key)
        if found is None or not _are_aligned(addresses) or _is_watched():
            self._launch_cold(
                key, (grid, grid_y), (*tensors, *numbers, *constants), num_warps, addresses
            )
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        nothing = (None, None, None)  # what hooks would be given, and those before and behind
        found.run(
            grid, grid_y, 1, stream, found.function, found.metadata, *nothing,
            *addresses, *numbers, *constants,
        )  # fmt: skip

    def _launch_cold(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, int],
        arguments: tuple[Any, ...],
        num_warps: int,
        addresses: list[int],
    ) -> None:
        launched = self._kernel[grid](*arguments, num_warps=num_warps)
        # The interpreter compiles nothing.
        if _are_aligned(addresses) and isinstance(launched, CompiledKernel):
            if self._caches:
                _leave_cache(launched, num_warps)
            self._compiled[key] = _Compiled(
                launched.run, launched.function, launched.packed_metadata, launched
            )


def _leave_cache(kernel: CompiledKernel, num_warps: int) -> None:
    """Asks the driver for the shared memory that blocks need, and no more; a hint."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    most = getattr(properties, "shared_memory_per_multiprocessor", 0)
    each = kernel.metadata.shared + 1024  # which the system adds to a block
    needed = min(_MULTIPROCESSOR_WARPS // num_warps, most // each) * each
    if not needed:
        return
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuFuncSetAttribute(
            ctypes.c_void_p(kernel.function), _CARVEOUT, -(-100 * needed // most)
        )


def _are_aligned(addresses: list[int]) -> bool:
    combined = 0
    for address in addresses:
        combined |= address
    return not combined % _ALIGNMENT


def _is_watched() -> bool:
    """Returns True if a launch hook is set, as by Triton's profiler."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
