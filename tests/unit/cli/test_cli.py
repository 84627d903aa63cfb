"""The commands through `main([...])`: what they print, what they return, what they hand on."""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import tlora_megatron
from tests.helpers.commands import Tlora
from tests.helpers.launch import HANG_S
from tests.unit.cli.conftest import JOB_RESULT, RESULT, RUN_RESULT
from tlora_megatron.cli import train
from tlora_megatron.cli.main import VARIABLES, build_parser
from tlora_megatron.cli.train import RichProgress


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _parsers(inner)


@pytest.mark.parametrize("parser", [*_parsers(build_parser())], ids=lambda parser: parser.prog)
def test_help_has_sentences_above_phrases_and_an_example(parser: argparse.ArgumentParser) -> None:
    groups = [group.description for group in parser._action_groups if group.description]
    for sentence in (str(parser.description), *groups):
        assert sentence[0].isupper(), sentence
        assert sentence.endswith("."), sentence
    assert re.search(rf"examples?:\n  {parser.prog}\b", str(parser.epilog))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            phrases = [str(choice.help) for choice in action._choices_actions]
        else:
            phrases = [str(action.help)]
        for phrase in phrases:
            assert phrase != "None", action
            assert not re.search(r"\w\.$", phrase), phrase
            is_name = phrase.startswith(("Hugging Face", "PostgreSQL"))
            assert is_name or not re.match("[A-Z][a-z ]", phrase), phrase


def controller(monkeypatch: pytest.MonkeyPatch, train_run: Any) -> None:
    """Puts a training that is a plain function in the controller's place."""
    module = ModuleType("tlora_megatron.runtime.controller")
    module.train_run = train_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


class TestTrain:
    def test_prints_the_summary(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch, tlora: Tlora
    ) -> None:
        def train_run(config: Any, show: Any, signals: Any) -> dict[str, Any]:
            show.emit("begun", None, {"jobs": {"one": [0, config.jobs[0].max_steps]}})
            show.emit("stepped", "one", {"step": 5, "loss": 0.5, "lr": 1e-3})
            return RESULT

        controller(monkeypatch, train_run)
        out = tlora("train", config_file)
        assert "training 1 jobs: one" in out
        assert "one 5/5 loss 0.5000" in out
        assert "2 -> 0.25" in out
        assert tlora.json("train", config_file)["jobs"]["one"] == JOB_RESULT
        assert "training 1 jobs" in tlora.err

    def test_leaves_the_process_group(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch, tlora: Tlora
    ) -> None:
        import torch.distributed as dist

        def train_run(*_: Any) -> dict[str, Any]:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return RESULT

        controller(monkeypatch, train_run)
        tlora("train", config_file)
        assert not dist.is_initialized()

    @pytest.mark.parametrize("status", ["failed", "rejected", "running"])
    def test_a_job_that_did_not_finish_is_exit_code_1(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch, status: str, tlora: Tlora
    ) -> None:
        jobs = {"one": JOB_RESULT, "two": {**JOB_RESULT, "status": status}}
        controller(monkeypatch, lambda *_: {"run": RUN_RESULT, "jobs": jobs})
        tlora("train", config_file, code=1)

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (ValueError("data must exist"), 2),
            (NotImplementedError("no such layout"), 2),
            (RuntimeError("NCCL"), 1),
            (OSError(28, "No space left on device"), 1),
            (ImportError("pip install wandb"), 1),
            (KeyboardInterrupt(), 130),
        ],
    )
    def test_errors_are_a_line_and_a_code(
        self,
        config_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        tlora: Tlora,
        error: BaseException,
        code: int,
    ) -> None:
        def train_run(*_: Any) -> None:
            raise error

        controller(monkeypatch, train_run)
        tlora("train", config_file, code=code)
        assert "Traceback" not in tlora.err
        assert (f"error: {error}" in tlora.err) == (code != 130)

    def test_debug_shows_the_traceback(self, monkeypatch: pytest.MonkeyPatch, tlora: Tlora) -> None:
        monkeypatch.setenv("TLORA_DEBUG", "1")
        assert "Traceback" in tlora("train", "nowhere.yaml", code=2)

    def test_other_ranks_are_silent(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch, tlora: Tlora
    ) -> None:
        def train_run(_: Any, show: Any, signals: Any) -> dict[str, Any]:
            assert show is None
            return RESULT

        monkeypatch.setenv("RANK", "1")
        controller(monkeypatch, train_run)
        tlora("train", config_file, "--set", "parallel.sequence_parallel=true")
        assert (tlora.out, tlora.err) == ("", "")

    def test_warns_of_settings_without_effect(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch, tlora: Tlora
    ) -> None:
        controller(monkeypatch, lambda *_: RESULT)
        tlora("train", config_file, "--set", "jobs[0].eval_every_steps=2")
        assert "warning: eval_every_steps of job one has no effect" in tlora.err


class TestLauncher:
    def test_nproc_hands_the_arguments_to_the_ranks(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch, tlora: Tlora
    ) -> None:
        calls = []

        def record(command: list[str], nproc: int, *, stop_timeout_s: float) -> int:
            calls.append((command, nproc, stop_timeout_s))
            return 7

        monkeypatch.setattr(train, "run_ranks", record)
        options = ["--set", "run.stop_timeout_s=3", "--output-dir=-x", "--json"]
        tlora("train", config_file, *options, "--nproc", 2, code=7)
        ((command, nproc, stop_timeout_s),) = calls
        assert (nproc, stop_timeout_s) == (2, 3.0)
        assert command == [
            *(sys.executable, "-m", "tlora_megatron.cli"),
            "train",
            str(config_file),
            "--set=run.stop_timeout_s=3",
            "--output-dir=-x",
            "--json",
        ]

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["--nproc=3", "--set=parallel.tp_size=2"], "world size must be a multiple of"),
            (["--hardware", "h100"], "--hardware must come with --plan auto, got 'h100'"),
            (["--lengths", "64"], "--lengths must come with --plan auto, got '64'"),
            *(
                ([f"--nproc={nproc}"], f"--nproc: must be an integer of at least 1, got {nproc}")
                for nproc in ("0", "-1", "two")
            ),
        ],
    )
    def test_wrong_options(
        self, config_file: Path, words: list[str], sentence: str, tlora: Tlora
    ) -> None:
        assert sentence in tlora("train", config_file, *words, code=2)

    @pytest.mark.parametrize(("rank", "nproc"), [(None, 1), ("0", 2)])
    def test_one_process_and_one_of_torchrun_need_no_other(
        self,
        config_file: Path,
        rank: str | None,
        nproc: int,
        monkeypatch: pytest.MonkeyPatch,
        tlora: Tlora,
    ) -> None:
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(train, "run_ranks", lambda *_, **__: pytest.fail("must not be called"))
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        controller(monkeypatch, lambda *_: RESULT)
        tlora("train", config_file, "--nproc", nproc)
        assert os.environ["OMP_NUM_THREADS"] == "5"

    def test_exit_code_and_one_error_line_come_back_from_the_ranks(self) -> None:
        script = (
            "import sys; from tlora_megatron.runtime import ranks;"
            "command = ranks.cli_command(['inspect', 'nowhere.yaml']);"
            "sys.exit(ranks.run_ranks(command, 2, stop_timeout_s=60))"
        )
        result = subprocess.run(
            [sys.executable, "-c", script],
            check=False,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert result.returncode == 2
        assert result.stderr.count("error: configuration file must be a readable file") == 1
        assert "Traceback" not in result.stderr


class TestProgress:
    def test_lines_come_at_their_time_and_name_unfinished_jobs(self) -> None:
        now_s = 0.0
        out = io.StringIO()
        show = RichProgress(Console(file=out, width=200), clock=lambda: now_s)
        show.emit("begun", None, {"jobs": {"one": [2, 10], "two": [0, 3], "three": [0, None]}})
        show.emit("stepped", "one", {"step": 4, "loss": 1.5, "lr": 1e-3})
        show.emit("stepped", "two", {"step": 3, "loss": 1.0, "lr": 1e-3})
        assert len(out.getvalue().splitlines()) == 1
        now_s = 65.0
        show.emit("progress", None, {"tokens_per_s": 1234.5})
        show.emit("note", "two", {"message": "finished"})
        show.close()
        show.close()
        assert out.getvalue().splitlines()[1:] == [
            "[01:05]  1,234 tokens/s  ~3 min left  one 4/10 loss 1.5000  three 0",
            "two: finished",
            "[01:05]  1,234 tokens/s  one 4/10 loss 1.5000  two 3/3 loss 1.0000  three 0",
        ]

    @pytest.mark.parametrize("terminal", [False, True])
    def test_a_run_that_goes_on_says_where(self, terminal: bool) -> None:
        out = io.StringIO()
        show = RichProgress(Console(file=out, width=99, force_terminal=terminal), resumes=True)
        show.emit("begun", None, {"jobs": {"math": [62, 90], "new": [0, 9], "bad": [9, 9]}})
        show.close()
        first = out.getvalue().splitlines()[0]
        assert first == "going on: math continues at step 62, new begins at step 0, bad has ended"

    def test_many_jobs_stay_one_line(self) -> None:
        out = io.StringIO()
        show = RichProgress(Console(file=out, width=300))
        show.close()
        assert out.getvalue() == "", "a run that has not begun has nothing to show"
        show.emit("begun", None, {"jobs": {f"job{index}": [0, 5] for index in range(20)}})
        show.close()
        assert out.getvalue().splitlines()[-1].endswith("job7 0/5  and 12 more")

    def test_bars_on_a_terminal(self) -> None:
        out = io.StringIO()
        show = RichProgress(Console(file=out, width=120, force_terminal=True))
        show.emit("begun", None, {"jobs": {"one[2]": [0, 10]}})
        show.emit("stepped", "one[2]", {"step": 4, "loss": 1.5, "lr": 1e-3})
        show.emit("progress", None, {"tokens_per_s": 1000})
        show.emit("note", "one[2]", {"message": "saved"})
        show.close()
        for text in ("one[2]", "4/10", "loss 1.5000", "1,000 tokens/s", "one[2]: saved"):
            assert text in out.getvalue()


def test_a_variable_that_is_misspelt_is_told(monkeypatch: pytest.MonkeyPatch, tlora: Tlora) -> None:
    for name in ("TLORA_KERNELS", "TLORA_VENV", "TLORA_KERNEL"):
        monkeypatch.setenv(name, "torch")
    tlora("train", "nowhere.yaml", code=2)
    told = "the environment's TLORA_KERNEL has no effect; did you mean TLORA_KERNELS?"
    assert [line for line in tlora.err.splitlines() if "TLORA_" in line] == [f"WARNING: {told}"]


def test_every_variable_that_the_package_reads_is_known() -> None:
    package = Path(tlora_megatron.__file__).parent
    texts = (file.read_text() for file in package.rglob("*.py"))
    read = {name for text in texts for name in re.findall(r'"TLORA_([A-Z_]+)"', text) if name}
    assert read == set(VARIABLES)


def test_version_and_help(tlora: Tlora) -> None:
    assert tlora("--version") == f"tlora {tlora_megatron.__version__}\n"
    assert "examples:\n  tlora train " in tlora("train", "--help")
    assert "required: COMMAND" in tlora(code=2)


def test_error_of_one_rank_names_it(monkeypatch: pytest.MonkeyPatch, tlora: Tlora) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("tlora_megatron.cli.main._OTHER_RANKS_WAIT_S", 0.0)
    said = tlora("train", "nowhere.yaml", code=2)
    assert "error on rank 3: configuration file must be a readable file" in said
