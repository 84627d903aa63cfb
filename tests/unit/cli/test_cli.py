"""The commands through `main([...])`: what they print, what they return, what they hand on."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import save_file

import tlora_megatron
from tests.helpers.launch import HANG_S
from tlora_megatron.cli import train
from tlora_megatron.cli.main import VARIABLES, build_parser, main
from tlora_megatron.cli.train import RichProgress

JOB_RESULT = {
    "status": "finished",
    "reason": None,
    "steps": 5,
    "max_steps": 5,
    "rank": 4,
    "last_loss": 0.5,
    "eval_loss_before": 2.0,
    "eval_loss_after": 0.25,
    "exact_match_before": 0.0,
    "exact_match_after": 0.875,
    "tokens": 12345,
    "target_tokens": 1000,
    "skipped_steps": 0,
    "adapter": "out/jobs/one/adapter",
}
RUN_RESULT = {
    "tokens_per_s": 4321.0,
    "world_size": 2,
    "wall_time_s": 12.5,
    "time_s": {"imports": 2.5, "rounds": 10.0},
    "rounds": 9,
    "nano_batches": {"count": 3, "controller": "best", "time_over_one": 0.9131},
}


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TLORA_DEBUG", raising=False)


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


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n')
    path = tmp_path / "run.yaml"
    document = {
        "base_model": {"path": "base"},
        "run": {"output_dir": str(tmp_path / "out")},
        "jobs": [{"name": "one", "data": {"train": "data.jsonl"}, "max_steps": 5}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["v_proj", "q_proj"],
        "base_model_name_or_path": "some/base",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {"a": np.zeros((4, 6), np.float32), "b": np.zeros((10, 4), np.float32)}
    save_file(tensors, path / "adapter_model.safetensors")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    failed = {**JOB_RESULT, "status": "failed", "reason": "loss is nan", "adapter": None}
    failed |= {"rank": 32, "num_blocks": 4}
    summary = {"run": RUN_RESULT, "jobs": {"one": JOB_RESULT, "two": failed}}
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "report.html").write_text("<html>")
    return path


def controller(monkeypatch: pytest.MonkeyPatch, train_run: Any) -> None:
    """Puts a training that is a plain function in the controller's place."""
    module = ModuleType("tlora_megatron.runtime.controller")
    module.train_run = train_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


class TestInspect:
    def test_config(self, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(config_file), "--set", "jobs.one.lora.rank=7"]) == 0
        out = capsys.readouterr().out
        for text in ("one", "7/32", "q_proj", "5 steps", "0.0002 constant", "data.jsonl"):
            assert text in out

    def test_config_json(self, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(config_file), "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["kind"] == "config"
        assert content["jobs"][0]["lora"]["rank"] == 16
        assert content["job_errors"] == []

    def test_config_shows_replicas(
        self, config_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        form = "1xTP2+SP@12288/selective + 4xTP1@6144"
        assert main(["inspect", str(config_file), f"--set=parallel.replicas={form}"]) == 0
        out = capsys.readouterr().out
        assert f"replicas: {form}/none (6 processes)" in out

    def test_config_shows_jobs_left_out(
        self, config_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        document = yaml.safe_load(config_file.read_text())
        document["run"]["on_job_error"] = "skip"
        document["jobs"].append({"name": "bad", "data": {"train": "no"}, "epochs": 1})
        config_file.write_text(yaml.safe_dump(document))
        assert main(["inspect", str(config_file)]) == 0
        assert "left out: bad: jobs[1].data.train must be an existing" in capsys.readouterr().out

    def test_adapter(self, adapter_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(adapter_dir)]) == 0
        out = capsys.readouterr().out
        for text in ("some/base", "q_proj, v_proj", "F32"):
            assert text in out

    def test_adapter_json(self, adapter_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(adapter_dir), "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["kind"] == "adapter"
        assert (content["rank"], content["alpha"]) == (4, 8)
        assert (content["tensors"], content["parameters"]) == (2, 64)

    def test_adapter_with_blocks_that_are_none(
        self, adapter_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = adapter_dir / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"use_bdlora": "yes"}))
        assert main(["inspect", str(adapter_dir)]) == 2
        assert "error: use_bdlora must be a JSON object, got 'yes'" in capsys.readouterr().err

    @pytest.mark.parametrize("damage", ["truncate", "remove"])
    def test_damaged_adapter(
        self, adapter_dir: Path, damage: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        weights = adapter_dir / "adapter_model.safetensors"
        content = weights.read_bytes()
        weights.unlink()
        if damage == "truncate":
            weights.write_bytes(content[:20])
        assert main(["inspect", str(adapter_dir)]) == 2
        assert "error: adapter must hold a readable adapter_model" in capsys.readouterr().err

    def test_run(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(run_dir)]) == 0
        out = capsys.readouterr().out
        for text in (
            "2 -> 0.25",
            "0.0% -> 87.5%",
            "12,345",
            "4,321 tokens/s, 2 processes\n",
            "time: 12.5 s = imports 2.5, rounds 10.0\n",
            "nano-batches: 3 (best), 0.913 of the time of 1",
            "two: loss is nan",
            "adapter of one: out/jobs/one/adapter",
            f"report: {run_dir}/report.html",
        ):
            assert text in out
        assert re.search(r"one +finished +4 +5/5", out)
        assert re.search(r"two +failed +32 / 4 blocks +5/5", out)

    @pytest.mark.parametrize(
        ("nano", "line"),
        [
            ({"asked": 1, "count": 1, "ran": {"1": 9}}, None),
            (
                {"asked": 3, "count": 3, "controller": None, "ran": {"1": 2, "3": 1007}},
                "nano-batches: 3 asked for; micro-batches ran: 2 in 1, 1,007 in 3",
            ),
            (
                {"asked": "auto", "count": 1, "controller": None, "ran": {"1": 9}},
                "nano-batches: auto asked for; micro-batches ran: 9 in 1",
            ),
        ],
    )
    def test_run_says_what_micro_batches_ran_in(
        self,
        run_dir: Path,
        nano: dict[str, Any],
        line: str | None,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path = run_dir / "summary.json"
        summary = json.loads(path.read_text())
        summary["run"]["nano_batches"] = nano
        path.write_text(json.dumps(summary))
        assert main(["inspect", str(run_dir)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [x for x in lines if x.startswith("nano-batches")] == ([line] if line else [])

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            (
                {"depth": 2, "shared_out_by": "predicted time", "predicted_busy_share": 0.96},
                "rounds: 2 micro-batches a replica, shared out by predicted time; replicas "
                "computed for 96% of a round and waited for the slowest one for 4%, by prediction",
            ),
            (
                {"depth": 1, "shared_out_by": "tokens", "predicted_busy_share": 0.75},
                "rounds: 1 micro-batch a replica, shared out by tokens; replicas computed for 75% "
                "of a round and waited for the slowest one for 25%, by prediction "
                "(run.round_depth: auto would share rounds out by time)",
            ),
            (
                {
                    "depth": 1,
                    "shared_out_by": "tokens",
                    "predicted_busy_share": 0.75,
                    "micro_batches_by_cp_size": {"1": 9, "2": 4},
                },
                "rounds: 1 micro-batch a replica, shared out by tokens; their ranks computed for "
                "75% of a round and waited for the slowest one for 25%, by prediction; "
                "micro-batches of the first process by context-parallel ranks: 9 of 1, 4 of 2",
            ),
        ],
    )
    def test_run_says_how_long_replicas_waited(
        self,
        run_dir: Path,
        changes: dict[str, Any],
        line: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path = run_dir / "summary.json"
        summary = json.loads(path.read_text())
        summary["run"]["balance"] = changes
        path.write_text(json.dumps(summary))
        assert main(["inspect", str(run_dir)]) == 0
        assert line in capsys.readouterr().out.splitlines()

    def test_run_says_who_computed_the_base(
        self, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = run_dir / "summary.json"
        summary = json.loads(path.read_text())
        reasons = ["layers 0-1 by Megatron's modules: fp8 is hybrid"]
        layers = {"own": 2, "modules": 2}
        summary["run"]["compute"] = {"layers": layers, "head": "own", "reasons": reasons}
        path.write_text(json.dumps(summary))
        assert main(["inspect", str(run_dir)]) == 0
        line = f"base: 2 of 4 layers by our kernels, head by ours; {reasons[0]}\n"
        assert line in capsys.readouterr().out

    def test_run_json(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(run_dir), "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["kind"] == "run"
        assert content["jobs"]["one"] == JOB_RESULT

    def test_run_with_malformed_summary(
        self, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (run_dir / "summary.json").write_text("{")
        assert main(["inspect", str(run_dir)]) == 2
        assert "summary.json must hold a JSON object, got" in capsys.readouterr().err

    def test_directory_that_is_neither(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["inspect", str(tmp_path)]) == 2
        assert "PATH must be a config file, or a directory with" in capsys.readouterr().err

    def test_overrides_need_a_config(
        self, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["inspect", str(run_dir), "--set", "run.seed=1"]) == 2
        assert "--set and --output-dir must be given with a config" in capsys.readouterr().err

    def test_needs_no_torch(self, config_file: Path, adapter_dir: Path) -> None:
        script = (
            "import sys; from tlora_megatron.cli.main import main;"
            "codes = [main(['inspect', path]) for path in sys.argv[1:]];"
            "sys.exit(any(codes) or 'torch' in sys.modules)"
        )
        argv = [sys.executable, "-c", script, str(config_file), str(adapter_dir)]
        assert subprocess.run(argv, check=False, stdout=subprocess.DEVNULL).returncode == 0


class TestTrain:
    def test_prints_the_summary(
        self,
        config_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def train_run(config: Any, show: Any, signals: Any) -> dict[str, Any]:
            show.emit("begun", None, {"jobs": {"one": [0, config.jobs[0].max_steps]}})
            show.emit("stepped", "one", {"step": 5, "loss": 0.5, "lr": 1e-3})
            return {"run": RUN_RESULT, "jobs": {"one": JOB_RESULT}}

        controller(monkeypatch, train_run)
        assert main(["train", str(config_file)]) == 0
        out = capsys.readouterr().out
        assert "training 1 jobs: one" in out
        assert "one 5/5 loss 0.5000" in out
        assert "2 -> 0.25" in out

    def test_leaves_the_process_group(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch.distributed as dist

        def train_run(*_: Any) -> dict[str, Any]:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return {"run": RUN_RESULT, "jobs": {"one": JOB_RESULT}}

        controller(monkeypatch, train_run)
        assert main(["train", str(config_file)]) == 0
        assert not dist.is_initialized()

    def test_json_alone_on_stdout(
        self,
        config_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def train_run(_: Any, show: Any, signals: Any) -> dict[str, Any]:
            show.emit("begun", None, {"jobs": {"one": [0, 5]}})
            return {"run": RUN_RESULT, "jobs": {"one": JOB_RESULT}}

        controller(monkeypatch, train_run)
        assert main(["train", str(config_file), "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["jobs"]["one"] == JOB_RESULT
        assert "training 1 jobs" in captured.err

    @pytest.mark.parametrize("status", ["failed", "rejected", "running"])
    def test_a_job_that_did_not_finish_is_exit_code_1(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch, status: str
    ) -> None:
        jobs = {"one": JOB_RESULT, "two": {**JOB_RESULT, "status": status}}
        controller(monkeypatch, lambda *_: {"run": RUN_RESULT, "jobs": jobs})
        assert main(["train", str(config_file)]) == 1

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
        capsys: pytest.CaptureFixture[str],
        error: BaseException,
        code: int,
    ) -> None:
        def train_run(*_: Any) -> None:
            raise error

        controller(monkeypatch, train_run)
        assert main(["train", str(config_file)]) == code
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert (f"error: {error}" in err) == (code != 130)

    def test_debug_shows_the_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TLORA_DEBUG", "1")
        assert main(["train", "nowhere.yaml"]) == 2
        assert "Traceback" in capsys.readouterr().err

    def test_wrong_config_is_exit_code_2_and_one_line(
        self, config_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["train", str(config_file), "--set", "jobs[0].lora.rank=x"]) == 2
        expected = "error: jobs[0].lora.rank must be an integer, got 'x' (job one)\n"
        assert capsys.readouterr().err == expected

    def test_other_ranks_are_silent(
        self,
        config_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def train_run(_: Any, show: Any, signals: Any) -> dict[str, Any]:
            assert show is None
            return {"run": RUN_RESULT, "jobs": {"one": JOB_RESULT}}

        monkeypatch.setenv("RANK", "1")
        controller(monkeypatch, train_run)
        override = "parallel.sequence_parallel=true"
        assert main(["train", str(config_file), "--set", override]) == 0
        assert capsys.readouterr() == ("", "")

    def test_warns_of_settings_without_effect(
        self,
        config_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        controller(monkeypatch, lambda *_: {"run": {}, "jobs": {"one": JOB_RESULT}})
        assert main(["train", str(config_file), "--set", "jobs[0].eval_every_steps=2"]) == 0
        assert "warning: eval_every_steps of job one has no effect" in capsys.readouterr().err


class TestLauncher:
    def test_nproc_hands_the_arguments_to_the_ranks(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []

        def record(command: list[str], nproc: int, *, stop_timeout_s: float) -> int:
            calls.append((command, nproc, stop_timeout_s))
            return 7

        monkeypatch.setattr(train, "run_ranks", record)
        options = ["--set", "run.stop_timeout_s=3", "--output-dir=-x", "--json"]
        assert main(["train", str(config_file), *options, "--nproc", "2"]) == 7
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

    def test_nproc_has_no_effect_under_torchrun(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        controller(monkeypatch, lambda *_: {"run": {}, "jobs": {"one": JOB_RESULT}})
        assert main(["train", str(config_file), "--nproc", "2"]) == 0

    def test_world_size_that_does_not_divide(
        self, config_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["train", str(config_file), "--nproc", "3", "--set", "parallel.tp_size=2"]
        assert main(argv) == 2
        assert "world size must be a multiple of" in capsys.readouterr().err

    @pytest.mark.parametrize(("option", "value"), [("--hardware", "h100"), ("--lengths", "64")])
    def test_the_planner_s_options_want_plan(
        self, config_file: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["train", str(config_file), option, value]) == 2
        assert f"{option} must come with --plan auto, got '{value}'" in capsys.readouterr().err

    @pytest.mark.parametrize("nproc", ["0", "-1", "two"])
    def test_nproc_that_is_no_count(
        self, config_file: Path, nproc: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["train", str(config_file), f"--nproc={nproc}"])
        expected = f"--nproc: must be an integer of at least 1, got {nproc}"
        assert expected in capsys.readouterr().err

    def test_one_process_needs_no_second(
        self, config_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(train, "run_ranks", lambda *_, **__: pytest.fail("must not be called"))
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        controller(monkeypatch, lambda *_: {"run": {}, "jobs": {"one": JOB_RESULT}})
        assert main(["train", str(config_file), "--nproc", "1"]) == 0
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
        show.emit("stepped", "one", {"step": 3, "loss": 1.5, "lr": 1e-3})
        show.emit("stepped", "two", {"step": 3, "loss": 1.0, "lr": 1e-3})
        assert len(out.getvalue().splitlines()) == 1
        now_s = 65.0
        show.emit("progress", None, {"tokens_per_s": 1234.5})
        show.emit("note", "two", {"message": "finished"})
        show.close()
        show.close()
        assert out.getvalue().splitlines()[1:] == [
            "[01:05]  1,234 tokens/s  one 3/10 loss 1.5000  three 0",
            "two: finished",
            "[01:05]  1,234 tokens/s  one 3/10 loss 1.5000  two 3/3 loss 1.0000  three 0",
        ]

    def test_many_jobs_stay_one_line(self) -> None:
        out = io.StringIO()
        show = RichProgress(Console(file=out, width=300))
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

    def test_finish_without_start_shows_nothing(self) -> None:
        out = io.StringIO()
        RichProgress(Console(file=out)).close()
        assert out.getvalue() == ""


def test_a_variable_that_is_misspelt_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TLORA_KERNELS", "torch")
    monkeypatch.setenv("TLORA_VENV", "of the scripts")
    monkeypatch.setenv("TLORA_KERNEL", "torch")
    main(["train", "nowhere.yaml"])
    told = "the environment's TLORA_KERNEL has no effect; did you mean TLORA_KERNELS?"
    assert [line for line in capsys.readouterr().err.splitlines() if "TLORA_" in line] == [
        f"WARNING: {told}"
    ]


def test_every_variable_that_the_package_reads_is_known() -> None:
    package = Path(tlora_megatron.__file__).parent
    texts = (file.read_text() for file in package.rglob("*.py"))
    read = {name for text in texts for name in re.findall(r'"TLORA_([A-Z_]+)"', text) if name}
    assert read == set(VARIABLES)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"tlora {tlora_megatron.__version__}\n"


@pytest.mark.parametrize("command", ["train", "inspect", "convert", "plan", "profile", "simulate"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert f"examples:\n  tlora {command} " in shown
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert f"\n    {command} " in capsys.readouterr().out


def test_no_command_is_exit_code_2_and_names_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "required: COMMAND" in capsys.readouterr().err


def test_error_of_one_rank_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("tlora_megatron.cli.main._OTHER_RANKS_WAIT_S", 0.0)
    assert main(["train", "nowhere.yaml"]) == 2
    assert "error on rank 3: configuration file must be a readable file" in capsys.readouterr().err
