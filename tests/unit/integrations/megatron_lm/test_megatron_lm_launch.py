"""The launcher: its command line, the machine without a GPU, one line a message."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tlora_megatron import launch
from tlora_megatron.integrations.megatron.cpu import NoStream
from tlora_megatron.integrations.megatron_lm import cpu, hooks
from tlora_megatron.training.run.determinism import ENVIRONMENT


@pytest.mark.parametrize("words", [[], ["--lr", "1"], ["nowhere.py"], ["--cpu"]])
def test_the_launcher_wants_a_script(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        launch.main(words)
    assert "usage: python -m tlora_megatron.launch [--cpu] SCRIPT" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^0$"):
        launch.main(["--help"])
    assert "torchrun" in capsys.readouterr().out


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that keeps its command line; no trainer is hooked."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.seen = list(sys.argv)\n")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "seen", [], raising=False)
    monkeypatch.setattr(hooks, "install", lambda callbacks: None)
    monkeypatch.setattr(launch, "join_agent", lambda: None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # so that it is put back
    return script


def test_without_a_gpu_switches_are_set(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[bool] = []
    monkeypatch.setattr(cpu, "install", lambda: installed.append(True))
    launch.main([str(script), "--bf16"])
    assert sys.seen == [str(script), "--bf16"]  # type: ignore[attr-defined]
    assert not installed
    launch.main(["--cpu", str(script), "--transformer-impl", "transformer_engine"])
    # The last value counts.
    given = [str(script), "--transformer-impl", "transformer_engine"]
    assert sys.seen == [*given, *cpu.FLAGS]  # type: ignore[attr-defined]
    assert installed


def test_without_a_checkout_there_is_a_sentence(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        cause = ModuleNotFoundError(name="megatron.training")
        raise ImportError("a Megatron-LM checkout must be importable") from cause

    monkeypatch.setattr(cpu, "install", refuse)
    with pytest.raises(SystemExit, match=r"^2$"):
        launch.main(["--cpu", str(script)])
    said = capsys.readouterr().err
    assert "error: a Megatron-LM checkout must be importable" in said
    assert "git clone --depth 1" in said


def test_one_process_needs_no_torchrun(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    launch.main([str(script)])
    assert "MASTER_PORT" not in os.environ
    launch.main([str(script), "--tlora-config", "jobs.yaml"])
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(os.environ.pop("MASTER_PORT")) < 65536
    monkeypatch.setenv("RANK", "1")
    launch.main([str(script), "--tlora-config", "jobs.yaml"])
    assert "MASTER_PORT" not in os.environ


def test_a_rank_that_waits_prints_no_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "show_error", lambda error: os.kill(os.getpid(), signal.SIGUSR2))
    ended: list[int] = []
    monkeypatch.setattr(launch, "STOP_SIGNALS", (signal.SIGUSR2,))
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: ended.append(signum))
    try:
        with (tmp_path / "stacks").open("w") as file:
            faulthandler.register(signal.SIGUSR2, file, all_threads=False, chain=True)
            with pytest.raises(SystemExit, match=r"^2$"):
                launch.Launcher().fail(ValueError("x"))
        assert (tmp_path / "stacks").read_text() == ""
        assert ended == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_that_was_taken_since_megatron_s_import_stays_taken(tmp_path: Path) -> None:
    taken: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (tmp_path / "stacks").open("w") as file:
            faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)
            signal.signal(signal.SIGTERM, lambda signum, frame: taken.append(signum))
            launch._print_no_stacks()
            os.kill(os.getpid(), signal.SIGTERM)
        assert (tmp_path / "stacks").read_text() == ""
        assert taken == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("leaves", [False, True], ids=["returns", "exits"])
def test_a_stopped_trainer_ends_with_the_signal_s_exit_code(leaves: bool) -> None:
    callbacks = launch.Launcher()
    callbacks.signals.stopped_by = signal.SIGUSR1
    if leaves:
        callbacks.signals._counter.count(signal.SIGUSR1)

    def pretrain() -> None:
        if leaves:  # as with --exit-signal-handler
            raise SystemExit(0)

    with pytest.raises(SystemExit) as caught:
        hooks._Hooks(callbacks)._pretrain(pretrain)
    assert caught.value.code == 138


def test_each_line_is_shown_once(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)  # as Megatron sets it up
    root.addHandler(handler)
    try:
        launch.main([str(script), "--tlora-config", "jobs.yaml"])
        logging.getLogger("tlora_megatron.anything").warning("a line")
    finally:
        root.removeHandler(handler)
    assert capsys.readouterr().err.count("a line") == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pretrain_vlm.py", "its model reads images"),
        ("train_rl.py", "reinforcement learning makes its own data"),
        ("pretrain_mamba.py", "state-space layers"),
        ("pretrain_bert.py", "its model is no decoder"),
    ],
)
def test_a_script_of_another_model_is_not_run(
    script: Path, name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = script.rename(script.with_name(name))
    launch.main([str(other)])
    sys.seen = []  # type: ignore[attr-defined]
    with pytest.raises(SystemExit, match=r"^2$"):
        launch.main([str(other), "--tlora-config", "jobs.yaml"])
    assert (
        f"with --tlora-config, as pretrain_gpt.py does, got {name}: {why}"
        in capsys.readouterr().err
    )
    assert sys.seen == []  # type: ignore[attr-defined]


def test_a_missing_package_is_named(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError):
        launch.main([str(script)])
    with pytest.raises(SystemExit, match=r"^2$"):
        launch.main([str(script), "--tlora-config", "jobs.yaml"])
    assert "error: the package nowhere_to_be_found must be installed" in capsys.readouterr().err


def test_cuda_devices_are_the_cpu() -> None:
    tensor = torch.ones(2)
    with cpu.CudaIsCpu():
        assert tensor.cuda() is tensor
        assert torch.zeros(1, device="cuda:0").device.type == "cpu"
        assert torch.zeros(1, device=torch.device("cuda", 1), pin_memory=True).is_pinned() is False
        assert tensor.to("cuda").device.type == "cpu"
        assert tensor.type() == "torch.cuda.FloatTensor"
        with NoStream() as stream:
            assert stream.wait_event(1) is stream


def test_variables_of_a_deterministic_run_are_set_before_the_script(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The trainer starts CUDA long before it reads the file of jobs."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("_meet_alone", "_print_no_stacks", "build_early"):
        monkeypatch.setattr(launch, name, lambda: None)
    monkeypatch.setattr(launch, "_check_script", lambda script: None)
    monkeypatch.setattr(launch.Launcher, "take_signals", lambda launcher: None)
    file = tmp_path / "jobs.yaml"
    file.write_text("run: {deterministic: false}")
    launch.main([str(script), "--tlora-config", str(file)])
    assert not ENVIRONMENT.keys() & os.environ.keys()
    file.write_text("run: {deterministic: true}")
    launch.main([str(script), "--tlora-config", str(file)])
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(SystemExit, match=r"^2$"):
        launch.main([str(script), "--tlora-config", str(file)])
    assert "NCCL_ALGO must be Ring" in capsys.readouterr().err
