"""`tlora inspect kernels`: on this machine as it is, and with GPUs put in place by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.commands import Tlora
from tlora_megatron.cli import inspect_kernels as module
from tlora_megatron.ops.lora.kernel_choice import KernelChoice


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TLORA_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TLORA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def put_gpus(
    monkeypatch: pytest.MonkeyPatch, names: list[str], problem: str = "nvcc was not found"
) -> None:
    """GPUs of capability 9.0 without the extension."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_name",
        lambda device: names[device if isinstance(device, int) else device.index],
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def kernel_choice(device: torch.device, dtype: torch.dtype) -> KernelChoice:
        if dtype == torch.float32:
            raise ValueError("TLORA_KERNELS must name kernels that run here, got triton: dtype")
        return KernelChoice("triton", "no CUDA extension")

    monkeypatch.setattr(module, "kernel_choice", kernel_choice)
    monkeypatch.setattr(module, "problem_of", lambda name, device, dtype: problem or None)


def test_a_machine_without_a_gpu(tlora: Tlora, tmp_path: Path) -> None:
    content = tlora.json("inspect", "kernels")
    assert content["kind"] == "kernels"
    assert content["forced"] is None
    (device,) = content["devices"]
    assert device["compute_capability"] is None
    assert [choice["dtype"] for choice in device["kernels"]] == ["bfloat16", "float16", "float32"]
    for choice in device["kernels"]:
        assert (choice["name"], choice["reason"]) == ("torch", "no GPU")
        assert [(f["name"], f["problem"]) for f in choice["faster"]] == [
            ("triton", "no GPU"),
            ("cuda", "no GPU"),
        ]
    assert content["versions"]["torch"] == torch.__version__
    assert content["cache_directory"] == str(tmp_path / "cache")
    assert content["library"] is None


def test_as_text(tlora: Tlora, tmp_path: Path) -> None:
    out = tlora("inspect", "kernels")
    for text in (
        "bfloat16: torch (no GPU)",
        "not triton: no GPU",
        f"versions: torch {torch.__version__}",
        f"built CUDA kernels: none in {tmp_path / 'cache'}",
    ):
        assert text in out


def test_gpus_of_a_name_are_shown_once(monkeypatch: pytest.MonkeyPatch, tlora: Tlora) -> None:
    put_gpus(monkeypatch, ["NVIDIA H100", "NVIDIA H200", "NVIDIA H100"])
    devices = tlora.json("inspect", "kernels")["devices"]
    assert [(d["name"], d["count"]) for d in devices] == [("NVIDIA H100", 2), ("NVIDIA H200", 1)]
    assert {d["compute_capability"] for d in devices} == {"9.0"}


def test_what_faster_kernels_need_is_named(monkeypatch: pytest.MonkeyPatch, tlora: Tlora) -> None:
    put_gpus(monkeypatch, ["Some GPU of tomorrow"] * 2)
    out = tlora("inspect", "kernels")
    for text in (
        "2 x Some GPU of tomorrow, compute capability 9.0",
        "bfloat16: triton (no CUDA extension)",
        "not cuda: nvcc was not found",
        "float32: none (TLORA_KERNELS must name kernels that run here",
    ):
        assert text in out


def test_a_forced_slower_one_says_how_to_get_the_faster(
    monkeypatch: pytest.MonkeyPatch, tlora: Tlora
) -> None:
    put_gpus(monkeypatch, ["NVIDIA H100"], problem="")
    choice = tlora.json("inspect", "kernels")["devices"][0]["kernels"][0]
    assert choice["faster"] == [{"name": "cuda", "problem": "it runs here, unset TLORA_KERNELS"}]


def test_a_name_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tlora: Tlora) -> None:
    monkeypatch.setenv("TLORA_KERNELS", "fast")
    err = tlora("inspect", "kernels", code=2)
    assert "TLORA_KERNELS must be one of torch, triton, cuda, got 'fast'" in err


def test_kernels_are_built_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tlora: Tlora, tmp_path: Path
) -> None:
    built: list[Path] = []
    monkeypatch.setattr("tlora_megatron.ops.kernel_build.build", built.append)
    tlora("inspect", "kernels", "--build")
    assert [path.parent for path in built] == [tmp_path / "cache"]
    assert "--build must be given with kernels" in tlora("inspect", tmp_path, "--build", code=2)


def test_options_of_configs_are_refused(tlora: Tlora) -> None:
    assert "must be given with a config file, got kernels" in tlora(
        "inspect", "kernels", "--set", "run.seed=1", code=2
    )
