"""Speeds and parts of rounds that the benchmark of a service beside `tlora train` reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


def test_a_gpu_that_is_not_there_is_refused_by_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        throughput.arguments([])
    assert "--gpus must be 0 on a machine without a GPU, got 1" in capsys.readouterr().err
    assert throughput.arguments(["--gpus", "0"]).gpus == 0
