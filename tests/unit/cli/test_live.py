"""`tlora train RUN --add FILE --cancel NAME` against a run that only answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import Tlora
from tests.helpers.scenario import make_scenario
from tlora_megatron.config.load import config_to_dict, load_config
from tlora_megatron.training.data.job_data import ENTRY_NAME
from tlora_megatron.training.live_run import TOKENS, RequestFolder
from tlora_megatron.training.run.output_dir import CONFIG_NAME, hold_output_dir


class Run:
    """Answers every request: a job that is added joins, one that is cancelled leaves."""

    def __init__(self, config: Path) -> None:
        self.output_dir = config.parent / "out"
        self.output_dir.mkdir()
        document = config_to_dict(load_config(config, output_dir=str(self.output_dir)))
        (self.output_dir / CONFIG_NAME).write_text(json.dumps(document))
        self.requests: list[Mapping[str, Any]] = []
        self._folder = RequestFolder(self.output_dir)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._over.wait(0.01):
            for request in self._folder.take():
                self.requests.append(request.body)
                step = {"step": 4} if request.body["job"] == "narrow" else {"error": "no such"}
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
