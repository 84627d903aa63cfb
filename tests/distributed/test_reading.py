"""One process of a node reads the data; the others get the same jobs, and the same refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.standing_world import world
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer

WORKER = Path(__file__).with_name("reading_worker.py")
GOOD = [{"prompt": f"{n} plus {n} is ", "completion": str(2 * n)} for n in range(5)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "base", "llama", vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(tmp_path / "base")
    for name, rows in {"good": GOOD, "other": GOOD[1:4], "bad": [*GOOD, {"prompt": 3}]}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    jobs = [
        {"name": "one", "data": {"train": "good.jsonl", "eval": "other.jsonl"}},
        {"name": "two", "data": {"train": "bad.jsonl"}},
        {"name": "three", "data": {"train": "other.jsonl"}},
    ]
    common = {"max_steps": 2, "batch_size": 2, "lora": {"rank": 2}, "max_seq_len": 64}
    document = {
        "base_model": {"path": "base", "dtype": "float32"},
        "run": {"output_dir": "out"},
        "jobs": [common | job for job in jobs],
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    return path


def said(config: Path, *overrides: str) -> str:
    """Returns the answer that both ranks give."""
    lines = re.findall(r"^<(.*)>$", world(WORKER, 2, config, *overrides), re.MULTILINE)
    assert len(lines) == 2
    assert lines[0] == lines[1]
    return str(lines[0])


def test_the_others_get_the_same_jobs(config: Path) -> None:
    result = said(config, "run.on_job_error=skip")
    assert result.startswith("['one', 'three'] [JobError(name='two', message=")
    assert "bad.jsonl line 6" in result


def test_the_others_stop_with_the_same_words(config: Path) -> None:
    assert "bad.jsonl line 6" in said(config)


def test_a_tokenizer_that_cannot_be_read_stops_all(config: Path) -> None:
    (config.parent / "base" / "tokenizer.json").write_text("{")
    assert said(config).startswith("refused: base_model must hold a readable tokenizer")
