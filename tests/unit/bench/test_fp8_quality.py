"""The bench of quality over an FP8 base: its runs, its rows and its picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.fp8_quality.__main__ import BASE
from scripts.bench.fp8_quality.jobs import TASKS, Study
from scripts.bench.fp8_quality.picture import plot_curves
from scripts.bench.fp8_quality.rows import CurveRow, EndRow, compare, curve, last_loss, read_job
from tlora_megatron.config.load import load_config


def study(tmp_path: Path, **changes: Any) -> Study:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "1 + 1?", "completion": "#### 2"}\n' * 900)
    options: dict[str, Any] = {
        "base": {"path": str(BASE), "dtype": "float32"},
        "tasks": TASKS,
        "seeds": 2,
        "steps": 200,
        "eval_rows": 8,
        "gsm8k": texts,
        "micro_batch_tokens": 2048,
    }
    return Study(**options | changes)


def test_both_runs_differ_in_the_base_alone(tmp_path: Path) -> None:
    configs = []
    for quantization in (None, "fp8"):
        path = tmp_path / f"{quantization}.json"
        study(tmp_path).write(quantization, tmp_path / "data", tmp_path / "out", path)
        configs.append(load_config(path))
    wide, fp8 = configs
    assert (wide.base_model.quantization, fp8.base_model.quantization) == (None, "fp8")
    assert wide.jobs == fp8.jobs
    assert [job.name for job in wide.jobs] == [
        f"{task}_{seed}" for task in TASKS for seed in (0, 1)
    ]
    assert {(job.max_steps, job.seed, job.name[-1]) for job in wide.jobs} == {
        (200, 0, "0"),
        (200, 1, "1"),
    }


def test_evaluation_rows_are_new_and_differ(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    study(tmp_path, eval_rows=40).write(None, tmp_path / "data", tmp_path / "out", path)
    for task in ("mirror", "sums"):
        held_out, train = (
            [json.loads(line)["prompt"] for line in (tmp_path / "data" / name).open()]
            for name in (f"{task}_eval.jsonl", f"{task}_train.jsonl")
        )
        assert len({*held_out}) == 40
        assert not {*held_out} & {*train}
    texts = [json.loads(line) for line in (tmp_path / "data" / "gsm8k_eval.jsonl").open()]
    assert texts[0] == {"text": "1 + 1?\n#### 2"}


def test_rows_of_a_job_and_their_comparison(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 1.0 / step} for step in range(1, 31)]
    records.insert(10, {"step": 10, "eval_loss": 9.0, "eval_exact_match": 0.0})
    records.append({"step": 30, "eval_loss": 0.5, "eval_exact_match": 0.75})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    losses, last = read_job(path)
    assert len(losses) == 30
    assert last["eval_loss"] == 0.5
    assert next(iter(curve(losses))) == (5, pytest.approx(sum(losses[:5]) / 5, abs=1e-5))
    assert last_loss(losses) == pytest.approx(sum(losses[10:]) / 20, abs=1e-5)
    ends, curves = [], []
    for precision, right, loss in (("bf16", 0.98, 0.50), ("fp8", 0.97, 0.52)):
        common: dict[str, Any] = {"base": "b", "precision": precision, "task": "sums", "seed": 0}
        curves.append(CurveRow(**common, step=5, loss=loss))
        ends.append(
            EndRow(**common, gpu="", versions="", commit="", steps=5, train_loss=loss,
                   eval_loss=loss, exact_match=right)
        )  # fmt: skip
    assert list(compare(ends, curves)) == [
        "sums     evaluation loss 0.5000 -> 0.5200 in FP8 (seeds differ by 0.0000), "
        "curves 0.0200 apart, exact match 98.00 -> 97.00 % (-1.00)"
    ]
    plot_curves([{k: str(v) for k, v in asdict(row).items()} for row in curves], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size
