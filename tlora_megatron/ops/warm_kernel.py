"""Launches of Triton kernels without Triton's look at every argument, once a kernel is compiled.

`kernel[grid](...)` binds arguments by name, asks each what it would be specialised for, formats its
options as text and looks up the kernel by all of it: more time on the host than the launch itself,
eight times a layer (scripts/bench/host_time.py). Here a kernel is found by what can change.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel

_ALIGNMENT = 16
"""Bytes: what Triton compiles pointers for, where they are so aligned."""


class WarmKernel:
    """A Triton kernel: tensors first, then numbers, then constants.

    Args:
        kernel: of `triton.jit` with every integer among its numbers in `do_not_specialize`: no
            value of one may be what it was compiled for.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def launch(
        self,
        grid: int,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[int, ...],
        *,
        num_warps: int,
        grid_y: int = 1,
    ) -> None:
        """Starts `grid * grid_y` programs on the current stream of the tensors' device."""
        addresses = 0
        key: list[Any] = [tensors[0].device.index, num_warps, *constants]
        for tensor in tensors:
            addresses |= tensor.data_ptr()
            key.append(tensor.dtype)
        found = None if addresses % _ALIGNMENT else self._compiled.get(tuple(key))
        if found is not None:
            found[grid, grid_y, 1](*tensors, *numbers, *constants)
            return
        launched = self._kernel[(grid, grid_y)](*tensors, *numbers, *constants, num_warps=num_warps)
        # The interpreter compiles nothing.
        if not addresses % _ALIGNMENT and isinstance(launched, CompiledKernel):
            self._compiled[tuple(key)] = launched
