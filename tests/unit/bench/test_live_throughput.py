"""Speeds and parts of rounds that the benchmark of a service beside `tlora train` reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts.bench.harness.turn_parts import PARTS, Parts
from scripts.bench.live import throughput
from tlora_megatron.training.data.tokenize import load_tokenizer

TOKENIZER = Path(__file__).parents[3] / "configs" / "quickstart" / "base"


def test_texts_have_as_many_tokens_as_the_jobs_of_the_step_benchmark(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    jobs = throughput.write_jobs(SimpleNamespace(size="toy"), tmp_path / "texts")
    assert [job["batch_size"] for job in jobs] == [1, 8, 2, 4, 8, 1, 4, 2]
    for line in Path(jobs[0]["data"]["train"]).read_text().splitlines():
        text = json.loads(line)["text"]
        assert len(tokenizer.encode(text, add_special_tokens=False)) == len(text) <= 64


def test_tokens_are_those_of_all_jobs_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now_s[0])
    tokens = throughput.Tokens(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    for step in range(1, 5):
        for name in ("a", "b"):
            with (tmp_path / "jobs" / name / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0, "tokens": 50}) + "\n")
                file.write(json.dumps({"step": step, "eval_loss": 1.0}) + "\n")
        tokens.look()
        now_s[0] += 2.0
    assert set(tokens.steps.values()) == {4}
    assert tokens.per_s(0.5) == pytest.approx(50.0)


def test_a_part_inside_another_takes_its_time_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("scripts.bench.harness.turn_parts.time.perf_counter", lambda: now_s[0])

    class Loop:
        def round(self) -> None:
            now_s[0] += 3.0
            self.save()

        def save(self) -> None:
            now_s[0] += 2.0

    parts = Parts(tmp_path)
    parts.count(Loop, "round", "launch")
    parts.count(Loop, "save", "save")
    parts.count(Loop, "gone", "pack")  # not in this checkout
    Loop().round()
    parts.behind_step()
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert {part: found[part] for part in PARTS if found[part]} == {"launch": 3.0, "save": 2.0}


def test_a_gpu_that_is_not_there_is_refused_by_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        throughput.arguments([])
    assert "--gpus must be 0 on a machine without a GPU, got 1" in capsys.readouterr().err
    assert throughput.arguments(["--gpus", "0"]).gpus == 0
