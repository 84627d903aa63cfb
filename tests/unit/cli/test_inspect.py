"""`tlora inspect`: configurations, adapters and runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from tests.helpers.commands import Tlora
from tests.helpers.launch import imported
from tests.unit.cli.conftest import JOB_RESULT, RUN_RESULT

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


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


def change_run(run_dir: Path, **values: Any) -> None:
    """Changes what the summary of a run says of the run."""
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["run"] |= values
    (run_dir / "summary.json").write_text(json.dumps(summary))


def test_config(config_file: Path, tlora: Tlora) -> None:
    out = tlora("inspect", config_file, "--set", "jobs.one.lora.rank=7")
    for text in ("one", "7/32", "q_proj", "5 steps", "0.0002 constant", "data.jsonl"):
        assert text in out
    content = tlora.json("inspect", config_file)
    assert content["kind"] == "config"
    assert content["jobs"][0]["lora"]["rank"] == 16
    assert content["job_errors"] == []


def test_data_as_trained_and_bad_lines(tmp_path: Path, tlora: Tlora) -> None:
    (tmp_path / "bad").write_text('{"text": "x"}\n{"prompt": "x"}\n\n' + "[]\n" * 9)
    words = (QUICKSTART, "--data", f"--set=jobs.sums.data.train={tmp_path / 'bad'}")
    out = tlora("inspect", *words, code=1)
    assert '<s>What is "cinimug" from back to front?\n⟦guminic</s>⟧\n' in out
    assert [line[-1] for line in out.splitlines() if "bad line " in line] == [*"24567"]
    jobs = tlora.json("inspect", *words, code=1)["jobs"]
    mirror = {"rows": 800, "eval_rows": 96, "tokens": 36_008, "learnt": 5_604}
    assert jobs["mirror"].items() >= (mirror | {"steps_an_epoch": 100, "steps": 160}).items()
    assert len(jobs["sums"]["errors"]) == 5
    assert "--data must be given with a config file" in tlora("inspect", tmp_path, "--data", code=2)


def test_files_are_checked_as_a_job_would_learn_them(tmp_path: Path, tlora: Tlora) -> None:
    said = zip(("user", "assistant") * 2, "abcd", strict=True)
    chat = {"messages": [{"role": role, "content": text} for role, text in said]}
    (tmp_path / "chats").write_text(json.dumps([chat]))
    base = QUICKSTART.parent / "quickstart" / "base"
    words = ("data", "check", tmp_path / "chats", "--base", base, "--set=data.learn=each")
    assert "\n<s>a\n⟦b</s>⟧\n<s>a\nb</s>c\n⟦d</s>⟧\n" in tlora(*words)
    found = tlora.json(*words, "--rows=1", "--set=max_seq_len=5")
    counts = {"rows": 1, "cut": 0, "left_out": 1, "tokens": 5, "learnt": 2, "longest": 5}
    assert found.items() >= counts.items()
    assert len(found["shown"]) == 1
    assert "0 of 2 sequences cut to max_seq_len 5, 1 more dropped" in found["warnings"][0]
    (tmp_path / "chats").write_text('[{"messages": []}, {}]')
    assert [*re.findall(r"row \d", tlora(*words, code=1))] == ["row 1", "row 2"]


def test_config_shows_replicas(config_file: Path, tlora: Tlora) -> None:
    form = "1xTP2+SP@12288/selective + 4xTP1@6144"
    out = tlora("inspect", config_file, f"--set=parallel.replicas={form}")
    assert f"replicas: {form}/none (6 processes)" in out


def test_config_shows_jobs_left_out(config_file: Path, tlora: Tlora) -> None:
    document = yaml.safe_load(config_file.read_text())
    document["run"]["on_job_error"] = "skip"
    document["jobs"].append({"name": "bad", "data": {"train": "no"}, "epochs": 1})
    config_file.write_text(yaml.safe_dump(document))
    assert "left out: bad: jobs[1].data.train must be an existing" in tlora("inspect", config_file)


def test_adapter(adapter_dir: Path, tlora: Tlora) -> None:
    out = tlora("inspect", adapter_dir)
    for text in ("some/base", "q_proj, v_proj", "F32"):
        assert text in out
    content = tlora.json("inspect", adapter_dir)
    assert content["kind"] == "adapter"
    assert (content["rank"], content["alpha"]) == (4, 8)
    assert (content["tensors"], content["parameters"]) == (2, 64)


def test_adapter_with_blocks_that_are_none(adapter_dir: Path, tlora: Tlora) -> None:
    path = adapter_dir / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_bdlora": "yes"}))
    said = tlora("inspect", adapter_dir, code=2)
    assert "error: use_bdlora must be a JSON object, got 'yes'" in said


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_adapter(adapter_dir: Path, damage: str, tlora: Tlora) -> None:
    weights = adapter_dir / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage == "truncate":
        weights.write_bytes(content[:20])
    assert "error: adapter must hold a readable adapter_model" in tlora(
        "inspect", adapter_dir, code=2
    )


def test_a_job_of_a_service_has_its_user_s_name(tmp_path: Path, tlora: Tlora) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "tokens": 7}))
    (tmp_path / "job.json").write_text(json.dumps({"name": "mirror"}))
    assert tlora.json("inspect", tmp_path)["jobs"] == {
        "mirror": {"status": "finished", "tokens": 7}
    }


def test_run(run_dir: Path, tlora: Tlora) -> None:
    out = tlora("inspect", run_dir)
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
    content = tlora.json("inspect", run_dir)
    assert (content["kind"], content["jobs"]["one"]) == ("run", JOB_RESULT)


def test_jobs_without_evaluation_have_a_training_loss(run_dir: Path, tlora: Tlora) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    for job in summary["jobs"].values():
        job.update({key: None for key in job if key.startswith(("eval_", "exact_"))})
    (run_dir / "summary.json").write_text(json.dumps(summary))
    out = tlora("inspect", run_dir)
    assert re.search(r"rank +steps +last loss +tokens", out)
    assert re.search(r"one +finished +4 +5/5 +0.5 +12,345", out)


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
    run_dir: Path, nano: dict[str, Any], line: str | None, tlora: Tlora
) -> None:
    change_run(run_dir, nano_batches=nano)
    lines = tlora("inspect", run_dir).splitlines()
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
    run_dir: Path, changes: dict[str, Any], line: str, tlora: Tlora
) -> None:
    change_run(run_dir, balance=changes)
    assert line in tlora("inspect", run_dir).splitlines()


def test_run_says_who_computed_the_base(run_dir: Path, tlora: Tlora) -> None:
    reasons = ["layers 0-1 by Megatron's modules: fp8 is hybrid"]
    layers = {"own": 2, "modules": 2}
    change_run(run_dir, compute={"layers": layers, "head": "own", "reasons": reasons})
    line = f"base: 2 of 4 layers by our kernels, head by ours; {reasons[0]}\n"
    assert line in tlora("inspect", run_dir)


def test_run_with_malformed_summary(run_dir: Path, tlora: Tlora) -> None:
    (run_dir / "summary.json").write_text("{")
    assert "summary.json must hold a JSON object, got" in tlora("inspect", run_dir, code=2)


def test_what_cannot_be_shown(run_dir: Path, tlora: Tlora) -> None:
    said = tlora("inspect", run_dir.parent, code=2)
    assert "PATH must be a config file, or a directory with" in said
    said = tlora("inspect", run_dir, "--set", "run.seed=1", code=2)
    assert "--set and --output-dir must be given with a config" in said


def test_needs_no_torch(config_file: Path, adapter_dir: Path) -> None:
    code = (
        "from tlora_megatron.cli.main import main\n"
        f"for path in {[str(config_file), str(adapter_dir)]}:\n"
        "    assert main(['inspect', path]) == 0"
    )
    assert not imported(code, "torch")
