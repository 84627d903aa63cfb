"""Warm launches: what a kernel was compiled for, and only that, takes the short way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

warm_kernel = pytest.importorskip("tlora_megatron.ops.warm_kernel")


class Compiled:
    """Notes what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.launches.append((grid, args))


class Kernel:
    """Compiles anew in every launch of its own."""

    def __init__(self, compiled: type[Any]) -> None:
        self._compiled = compiled
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, num_warps: int) -> Any:
            self.compiled.append(self._compiled())
            return self.compiled[-1]

        return launch


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_kernel, "CompiledKernel", Compiled)


def test_the_second_launch_goes_to_the_compiled_kernel_with_its_own_arguments() -> None:
    kernel = Kernel(Compiled)
    warm = warm_kernel.WarmKernel(kernel)
    first, second = torch.zeros(16), torch.ones(32)
    warm.launch(3, (first,), (16,), (64, True), num_warps=4)
    warm.launch(5, (second,), (32,), (64, True), num_warps=4)
    (only,) = kernel.compiled
    ((grid, args),) = only.launches
    assert grid == (5, 1, 1)
    assert args[0] is second
    assert args[1:] == (32, 64, True)


@pytest.mark.parametrize(
    ("dtype", "constants", "num_warps"),
    [
        (torch.float16, (64,), 4),
        (torch.float32, (32,), 4),
        (torch.float32, (64,), 8),
    ],
)
def test_another_kind_of_launch_is_compiled_for_itself(
    dtype: torch.dtype, constants: tuple[int, ...], num_warps: int
) -> None:
    kernel = Kernel(Compiled)
    warm = warm_kernel.WarmKernel(kernel)
    warm.launch(1, (torch.zeros(16),), (), (64,), num_warps=4)
    warm.launch(1, (torch.zeros(16, dtype=dtype),), (), constants, num_warps=num_warps)
    assert len(kernel.compiled) == 2
    assert not kernel.compiled[0].launches


def test_a_tensor_off_16_bytes_neither_takes_nor_leaves_a_kernel() -> None:
    kernel = Kernel(Compiled)
    warm = warm_kernel.WarmKernel(kernel)
    shifted = torch.zeros(17)[1:]
    for tensor in (shifted, torch.zeros(16), shifted, torch.zeros(16)):
        warm.launch(1, (torch.zeros(16), tensor), (), (), num_warps=4)
    assert [len(each.launches) for each in kernel.compiled] == [0, 1, 0]


def test_the_interpreter_leaves_nothing_to_launch() -> None:
    kernel = Kernel(type(None))
    warm = warm_kernel.WarmKernel(kernel)
    for _ in range(2):
        warm.launch(1, (torch.zeros(16),), (), (), num_warps=4)
    assert len(kernel.compiled) == 2


INTEGERS = ("num_rows", "first_row", "end_row", "dropout_key", "first_column", "count")
"""What kernels call their integers."""


@pytest.mark.parametrize("module", ["rms_norm", "swiglu", "rotary", "up", "gather"])
def test_no_value_of_an_integer_is_compiled_for(module: str) -> None:
    """Or a kernel for one row, or rows in sixteens, would be launched for others."""
    runtime = pytest.importorskip("triton.runtime.jit")
    found = pytest.importorskip(f"tlora_megatron.ops.triton_{module}")
    kernels = [k for k in vars(found).values() if isinstance(k, warm_kernel.WarmKernel)]
    assert kernels
    for warm in kernels:
        if not isinstance(warm._kernel, runtime.JITFunction):
            pytest.skip("interpreted")
        for param in warm._kernel.params:
            assert param.do_not_specialize == (param.name in INTEGERS), param.name
