"""A run's file as submissions, one a job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import HANG_S
from tests.unit.house.test_floors import PACKAGE, is_within, modules_of
from tlora_megatron.config.job import ServiceSpec
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.service.prepare.submission import (
    Submission,
    read_submissions,
    split_submissions,
)

JOB = {"name": "a", "data": {"train": "a.jsonl"}, "max_steps": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    return tmp_path


def _document(**more: Any) -> dict[str, Any]:
    return {"base_model": {"path": "base"}, **more}


def test_every_job_of_a_file_is_a_submission_that_travels(folder: Path) -> None:
    wish = {"gpus": 2, "max_slowdown": 2, "priority": -1}
    document = _document(
        defaults={"batch_size": 3},
        jobs=[JOB, {**JOB, "name": "b", "service": wish, "eval_every_steps": 2}],
        run={"output_dir": "x"},
        parallel={"tp_size": 2},
    )
    (folder / "run.json").write_text(json.dumps(document))
    (one, two), notes = read_submissions(folder / "run.json", ["jobs.a.lora.rank=4"])
    assert (one.name, one.job_spec().lora.rank, one.job_spec().batch_size) == ("a", 4, 3)
    assert one.document["data"]["train"] == str(folder / "a.jsonl")
    assert one.base_model["path"] == str(folder / "base")
    assert two.job_spec().service == ServiceSpec(gpus=2, max_slowdown=2.0, priority=-1)
    assert Submission.from_json(two.to_json()) == two
    assert [note.split(" ")[1] for note in notes] == ["parallel", "run", "of"]


def test_bases_that_differ_have_other_keys(folder: Path) -> None:
    keys = set()
    for more in ({}, {"dtype": "float32"}, {"path": "."}):
        document = _document(jobs=[JOB])
        document["base_model"].update(more)
        keys.add(split_submissions(document, folder).submissions[0].base_key)
    assert len(keys) == 3
    assert sum(key.startswith("base-") for key in keys) == 2


def test_a_single_job_needs_no_list(folder: Path) -> None:
    (one,), notes = split_submissions(_document(**JOB), folder)
    assert (one.name, notes) == ("a", ())


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"jobs": [JOB]}, "base_model must be given"),
        (_document(jobs=[]), r"jobs must be a list of at least one job"),
        (_document(jobs=[JOB], jbos=1), r"jbos is not a known key"),
        (_document(jobs=[{**JOB, "max_steps": 0}]), r"jobs\[0\].max_steps must be at least 1"),
        (_document(jobs=[{**JOB, "service": {"gpu": 1}}]), r"jobs\[0\].service.gpu is not a known"),
        (_document(jobs=[{**JOB, "service": {"gpus": 0}}]), r"service.gpus must be at least 1"),
        (_document(jobs=[{**JOB, "data": {"train": "no"}}]), r"train must be an existing file"),
    ],
)
def test_mistakes_have_the_sentences_of_train(
    folder: Path, document: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        split_submissions(document, folder)


def test_the_service_without_its_worker_imports_no_torch(repo: Path) -> None:
    names = [name for name in modules_of(repo) if is_within(name, f"{PACKAGE}.service")]
    names = [name for name in names if not is_within(name, f"{PACKAGE}.service.worker")]
    own_process = {f"{PACKAGE}.service.engines.ray.{name}" for name in ("bridge", "probe_auth")}
    own_process.add(f"{PACKAGE}.service.sampling.process")
    names = [name for name in names if name not in own_process]  # they import Ray, or torch
    code = (
        f"import sys, importlib\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'megatron', 'transformers', 'ray'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, timeout=HANG_S
    )
    assert (result.returncode, result.stderr, result.stdout.strip()) == (0, "", "")
