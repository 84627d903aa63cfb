"""Warm launches: what a kernel was compiled for, and only that, takes the short way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

warm_kernel = pytest.importorskip("tlora_megatron.ops.warm_kernel")


class Compiled:
    """Notes what it is launched with, as `triton.compiler.CompiledKernel` is."""

    def __init__(self) -> None:
        launches: list[tuple[Any, ...]] = []
        self.launches = launches
        self.function, self.packed_metadata = 99, (4, 1, 0)
        self.run = lambda *args: launches.append(args)  # Triton's launcher does not hold the kernel


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


def made(compiled: type[Any] = Compiled) -> tuple[Kernel, Any]:
    kernel = Kernel(compiled)
    return kernel, warm_kernel.WarmKernel(kernel)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_kernel, "CompiledKernel", Compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)


def test_the_second_launch_goes_to_the_compiled_kernel_with_its_own_addresses() -> None:
    kernel, warm = made()
    first, second = torch.zeros(16), torch.ones(32)
    warm.launch(3, (first,), (16,), (64, True), num_warps=4)
    warm.launch(5, (second,), (32,), (64, True), num_warps=4, grid_y=2)
    (only,) = kernel.compiled
    grid, stream, no_hooks = (5, 2, 1), 7, (None, None, None)
    own = (second.data_ptr(), 32, 64, True)
    assert only.launches == [(*grid, stream, 99, (4, 1, 0), *no_hooks, *own)]


@pytest.mark.slow
def test_what_is_launched_by_its_address_stays_loaded() -> None:
    """Triton 3.9 unloads what its own caches have dropped."""
    kernel, warm = made()
    warm.launch(1, (torch.zeros(16),), (), (), num_warps=4)
    launched = weakref.ref(kernel.compiled.pop())
    gc.collect()
    assert launched() is not None


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_every_launch(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, warm = made()
    for calls in ([], [print], []):
        monkeypatch.setattr(getattr(warm_kernel.knobs.runtime, hook), "calls", calls)
        warm.launch(1, (torch.zeros(16),), (), (), num_warps=4)
    assert [len(each.launches) for each in kernel.compiled] == [0, 1]


@pytest.mark.parametrize(
    ("dtype", "constants", "num_warps"),
    [(torch.float16, (64,), 4), (torch.float32, (32,), 4), (torch.float32, (64,), 8)],
)
def test_another_kind_of_launch_is_compiled_for_itself(
    dtype: torch.dtype, constants: tuple[int, ...], num_warps: int
) -> None:
    kernel, warm = made()
    warm.launch(1, (torch.zeros(16),), (), (64,), num_warps=4)
    warm.launch(1, (torch.zeros(16, dtype=dtype),), (), constants, num_warps=num_warps)
    assert len(kernel.compiled) == 2
    assert not kernel.compiled[0].launches


def test_a_tensor_off_16_bytes_neither_takes_nor_leaves_a_kernel() -> None:
    kernel, warm = made()
    shifted = torch.zeros(17)[1:]
    for tensor in (shifted, torch.zeros(16), shifted, torch.zeros(16)):
        warm.launch(1, (torch.zeros(16), tensor), (), (), num_warps=4)
    assert [len(each.launches) for each in kernel.compiled] == [0, 1, 0]


def test_the_interpreter_leaves_nothing_to_launch() -> None:
    kernel, warm = made(type(None))
    for _ in range(2):
        warm.launch(1, (torch.zeros(16),), (), (), num_warps=4)
    assert len(kernel.compiled) == 2


INTEGERS = ("num_rows", "first_row", "end_row", "dropout_key", "first_column", "count")
"""Names that kernels have for their integers."""


MODULES = "frozen.rms_norm_triton frozen.swiglu_triton frozen.rotary_triton lora.triton_ops"


@pytest.mark.parametrize("module", [*MODULES.split(), "lora.triton_parts"])
def test_no_value_of_an_integer_is_compiled_for(module: str) -> None:
    """Or a kernel for one row, or rows in sixteens, would be launched for others."""
    runtime = pytest.importorskip("triton.runtime.jit")
    found = pytest.importorskip(f"tlora_megatron.ops.{module}")
    kernels = [k for k in vars(found).values() if isinstance(k, warm_kernel.WarmKernel)]
    assert kernels
    for warm in kernels:
        if not isinstance(warm._kernel, runtime.JITFunction):
            pytest.skip("interpreted")
        for param in warm._kernel.params:
            assert param.do_not_specialize == (param.name in INTEGERS), param.name
