"""Which kernels a device gets, with the machine's properties put in place by hand."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.launch import imported
from tlora_megatron.ops.lora import kernel_choice as choice
from tlora_megatron.ops.lora.kernel_choice import KernelChoice

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HALF = (torch.bfloat16, torch.float16)


class ExtensionUnavailable(RuntimeError):
    """The same as in `ops.kernel_build`."""


@dataclass
class Machine:
    """The answers of modules that cannot be had here."""

    monkeypatch: pytest.MonkeyPatch
    loads: int = 0

    def set(
        self,
        capability: tuple[int, int],
        *,
        triton: str | None = None,
        extension: str | None = None,
        compiler: bool = True,
    ) -> None:
        """A GPU of a capability; the reasons say why triton or the extension are missing."""

        def load_extension() -> object:
            self.loads += 1
            if extension is not None:
                raise ExtensionUnavailable(extension)
            return object()

        def import_module(name: str) -> ModuleType:
            if triton is not None:
                raise ImportError(triton)
            return ModuleType(name)

        patch = self.monkeypatch
        patch.setattr(choice.shutil, "which", lambda name: compiler and f"/bin/{name}")
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(choice.importlib, "import_module", import_module)
        self.module(
            "kernel_build", load_extension=load_extension, ExtensionUnavailable=ExtensionUnavailable
        )

    def module(self, name: str, **contents: Any) -> None:
        """Puts a module of `ops` in place of the real one."""
        full = f"tlora_megatron.ops.{name}"
        module = ModuleType(full)
        vars(module).update(contents)
        self.monkeypatch.setitem(sys.modules, full, module)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.delenv("TLORA_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    caches = [value for value in vars(choice).values() if hasattr(value, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield Machine(monkeypatch)
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("forced", [None, ""])
def test_cpu_takes_torch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, forced: str | None
) -> None:
    if forced is not None:
        monkeypatch.setenv("TLORA_KERNELS", forced)
    for dtype in (*HALF, torch.float32):
        assert choice.kernel_choice(CPU, dtype) == KernelChoice("torch", "no GPU")


TOO_OLD = "compute capability must be at least 8.0, got 7.5"
NO_TRITON = "triton cannot be imported (broken); pip install triton"
NO_COMPILER = "triton needs a C compiler; install gcc, or name one with CC"


@pytest.mark.parametrize(
    ("state", "dtype", "name", "reason"),
    [
        ({}, HALF[0], "cuda", "compute capability 9.0, extension loaded"),
        ({}, HALF[1], "triton", "dtype must be bfloat16, got float16"),
        ({}, torch.float32, "torch", "dtype must be bfloat16 or float16, got float32"),
        ({"capability": (8, 6)}, HALF[0], "triton", "compute capability 8.6"),
        ({"capability": (10, 0)}, HALF[0], "triton", "compute capability 10.0"),
        ({"capability": (7, 5)}, HALF[0], "torch", TOO_OLD),
        ({"triton": "broken"}, HALF[0], "torch", NO_TRITON),
        ({"compiler": False}, HALF[0], "torch", NO_COMPILER),
        ({"extension": "no nvcc"}, HALF[0], "triton", "no CUDA extension: no nvcc"),
    ],
)
def test_the_choice_and_its_reason(
    machine: Machine, state: dict[str, Any], dtype: torch.dtype, name: str, reason: str
) -> None:
    machine.set(**{"capability": (9, 0), **state})
    assert choice.kernel_choice(GPU, dtype) == KernelChoice(name, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("missing", "dtypes", "name", "said", "loads"),
    [
        ({"extension": "nvcc was not found"}, HALF[:1] * 3, "triton", "nvcc was not found", 1),
        ({"triton": "No module"}, (*HALF, torch.float32), "torch", "pip install triton", 0),
    ],
)
def test_what_is_missing_is_warned_about_and_tried_once(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    missing: dict[str, str],
    dtypes: tuple[torch.dtype, ...],
    name: str,
    said: str,
    loads: int,
) -> None:
    machine.set((9, 0), **missing)
    with caplog.at_level(logging.WARNING, logger="tlora_megatron"):
        assert {choice.kernel_choice(GPU, dtype).name for dtype in dtypes} == {name}
    (record,) = caplog.records
    assert said in record.getMessage()
    assert machine.loads == loads


def test_a_gpu_that_is_too_old_or_fp32_is_no_reason_to_warn(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.set((7, 5), triton="No module named 'triton'")
    choice.kernel_choice(GPU, torch.float16)
    machine.set((9, 0), triton="No module named 'triton'")
    choice.kernel_choice(GPU, torch.float32)
    assert not caplog.records


def test_nothing_is_built_or_warned_about_where_it_would_not_be_used(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set((8, 0), extension="must not be asked")
    choice.kernel_choice(GPU, torch.bfloat16)
    machine.set((9, 0), extension="must not be asked")
    choice.kernel_choice(GPU, torch.float32)
    for forced in ("torch", "triton"):
        monkeypatch.setenv("TLORA_KERNELS", forced)
        choice.kernel_choice(GPU, torch.bfloat16)
    assert machine.loads == 0
    assert not caplog.records


@pytest.mark.parametrize("name", ["torch", "triton", "cuda"])
def test_forced(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine.set((9, 0))
    monkeypatch.setenv("TLORA_KERNELS", name)
    expected = KernelChoice(name, f"TLORA_KERNELS={name}")  # type: ignore[arg-type]
    assert choice.kernel_choice(GPU, torch.bfloat16) == expected


@pytest.mark.parametrize(
    ("forced", "device", "state", "dtype", "match"),
    [
        ("fast", GPU, {}, HALF[0], "one of torch, triton, cuda, got 'fast'"),
        ("triton", CPU, {}, HALF[0], "name kernels that run here, got triton: no GPU"),
        ("cuda", CPU, {}, HALF[0], "got cuda: no GPU"),
        ("triton", GPU, {"capability": (7, 0)}, HALF[0], "at least 8.0, got 7.0"),
        ("triton", GPU, {"triton": "broken"}, HALF[0], r"triton cannot be imported \(broken\)"),
        ("triton", GPU, {}, torch.float32, "dtype must be bfloat16 or float16, got float32"),
        ("cuda", GPU, {"capability": (8, 0)}, HALF[0], "must be 9.x, got 8.0"),
        ("cuda", GPU, {"extension": "nvcc was not found"}, HALF[0], "cuda: nvcc was not found"),
        ("cuda", GPU, {"triton": "broken"}, HALF[0], "triton cannot be imported"),
        ("cuda", GPU, {}, HALF[1], "dtype must be bfloat16, got float16"),
    ],
)
def test_forced_refusals(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    forced: str,
    device: torch.device,
    state: dict[str, Any],
    dtype: torch.dtype,
    match: str,
) -> None:
    machine.set(**{"capability": (9, 0), **state})
    monkeypatch.setenv("TLORA_KERNELS", forced)
    with pytest.raises(ValueError, match=f"^TLORA_KERNELS must .*{match}"):
        choice.kernel_choice(device, dtype)


def test_interpreted_triton_runs_on_the_cpu_where_it_is_forced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set((9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choice.kernel_choice(CPU, torch.bfloat16).name == "torch"
    monkeypatch.setenv("TLORA_KERNELS", "triton")
    assert choice.kernel_choice(CPU, torch.bfloat16).name == "triton"


def test_one_object_of_the_chosen_class(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.set((9, 0))
    kinds = {"torch_ops": "TorchOps", "triton_ops": "TritonOps", "cuda_ops": "CudaOps"}
    for module, kind in kinds.items():
        name = module.removesuffix("_ops")
        stand_in = type(kind, (SimpleNamespace,), {"name": name})
        machine.module(f"lora.{module}", **{kind: stand_in})
        monkeypatch.setenv("TLORA_KERNELS", name)
        ops = choice.choose_ops(GPU, torch.bfloat16)
        assert type(ops).__name__ == kind
        assert choice.choose_ops(GPU, torch.bfloat16) is ops
    monkeypatch.setenv("TLORA_KERNELS", "triton")
    assert ops.fallback is choice.choose_ops(GPU, torch.bfloat16)


@pytest.mark.slow
def test_importing_loads_no_kernels() -> None:
    heavy = ("triton", "tlora_megatron.ops.kernel_build", "tlora_megatron.ops.lora.torch_ops")
    assert not imported("import tlora_megatron.ops.lora.kernel_choice", *heavy)
