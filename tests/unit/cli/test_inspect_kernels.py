"""`tlora inspect kernels`, and `--add` and `--cancel` against a run that only answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import Tlora
from tests.helpers.scenario import make_scenario
from tlora_megatron.cli import inspect_kernels as module
from tlora_megatron.config.load import config_to_dict, load_config
from tlora_megatron.ops.lora.kernel_choice import KernelChoice
from tlora_megatron.training.data.job_data import ENTRY_NAME
from tlora_megatron.training.run.output_dir import CONFIG_NAME, TOKENS, LiveFolder, hold_output_dir


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TLORA_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
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


class Run:
    """Answers every request: a job that is added joins, one that is cancelled leaves."""

    def __init__(self, config: Path) -> None:
        self.output_dir = config.parent / "out"
        self.output_dir.mkdir()
        document = config_to_dict(load_config(config, output_dir=str(self.output_dir)))
        (self.output_dir / CONFIG_NAME).write_text(json.dumps(document))
        self.requests: list[Mapping[str, Any]] = []
        self._folder = LiveFolder(self.output_dir)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._over.wait(0.01):
            for request in self._folder.take():
                self.requests.append(request.body)
                name = request.body["job"]
                error = "no such" if name == "x" else f"job {name!r} must still train"
                step = {"step": 4} if name == "narrow" else {"error": error}
                joins = {"round": 7, "from_step": 0, "num_steps": 9}
                is_add = request.body["kind"] == "add"
                self._folder.answer(request.number, joins if is_add else step)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._folder.close()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_scenario(tmp_path)


@pytest.fixture
def run(config: Path) -> Iterator[Run]:
    made = Run(config)
    with hold_output_dir(made.output_dir):
        yield made
    made.close()


def _late(config: Path, **fields: Any) -> Path:
    job = {"name": "late", "data": {"train": "attention.jsonl"}, "max_steps": 9, **fields}
    path = config.with_name("late.json")
    path.write_text(json.dumps(job))
    return path


def test_jobs_are_checked_tokenized_and_told(config: Path, run: Run, tlora: Tlora) -> None:
    arguments = ["--output-dir", str(run.output_dir), "--add", str(_late(config))]
    said = " ".join(tlora("train", config, *arguments, "--cancel", "narrow").split())
    assert "without run.portion_tokens the last bits" in said
    assert "job late has joined the run in" in said
    assert "behind round 7, at step 0 of 9" in said
    assert "job narrow is saved at step 4 and has left" in said
    added, cancelled = run.requests
    assert (added["job"], added["document"]["lora"]["rank"]) == ("late", 16)
    assert (run.output_dir / TOKENS / added["tokens"]["train"] / ENTRY_NAME).is_file()
    assert cancelled == {"kind": "cancel", "job": "narrow"}
    assert tlora("train", run.output_dir, "--cancel", "x", code=1) == "error: job x: no such\n"
    said = tlora("train", run.output_dir, "--cancel", "y", code=1)
    assert said == "error: job 'y' must still train\n"
    assert tlora.json("train", run.output_dir, "--cancel", "x", code=1) == {
        "x": {"error": "no such"}
    }


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"base_model": {"path": "base"}}, "base_model is not a known key"),
        ({"data": {"train": "nowhere"}}, r"data.train must be an existing file"),
        ({"portion_tokens": 999}, r"portion_tokens must be at most run.micro_batch_tokens = 256"),
        ({"max_seq_len": 4, "data": {"train": "attention.jsonl", "overlong": "error"}}, "at most"),
    ],
)
def test_a_mistake_asks_the_run_nothing(
    config: Path, run: Run, fields: dict[str, Any], error: str, tlora: Tlora
) -> None:
    assert error in " ".join(
        tlora("train", run.output_dir, "--add", _late(config, **fields), code=2).split()
    )
    assert run.requests == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--cancel", "a", "--cancel", "a"], "--add and --cancel must name job 'a' once, got it 2"),
        (["--cancel", "a", "--nproc", "2"], "--nproc must be left out with --add and --cancel"),
        (["--cancel", "a", "--plan", "auto"], "--plan must be left out with --add and --cancel"),
        (["--cancel", "a", "--set", "run.output_dir=b"], "--set must be left out with --add"),
        (["--cancel", "a", "--output-dir", "b"], "--output-dir must be left out here, got 'b'"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    run: Run, arguments: list[str], error: str, tlora: Tlora
) -> None:
    assert error in " ".join(tlora("train", run.output_dir, *arguments, code=2).split())
    assert run.requests == []


def test_without_a_live_run_nothing_is_started(config: Path, tlora: Tlora) -> None:
    assert "a run must be training in" in " ".join(
        tlora("train", config, "--cancel", "x", code=2).split()
    )
