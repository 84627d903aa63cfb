"""Jobs that a client drives: what they leave out, and where there is no client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.load import read_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.sections import job_to_dict, read_job
from tlora_megatron.service.prepare.submission import split_submissions

ENTRY: dict[str, Any] = {"name": "t", "driven": True, "lora": {"rank": 4}}
BASE = {"path": "configs/quickstart/base"}


def test_document_comes_back_without_what_a_client_sends() -> None:
    job = read_job(dict(ENTRY), Path("/"))
    assert job.driven
    document = job_to_dict(job)
    assert not {"data", "max_steps", "epochs", "optimizer", "schedule"} & document.keys()
    assert read_job(document, None) == job


@pytest.mark.parametrize("key", ["data", "max_steps", "epochs", "optimizer", "schedule"])
def test_what_a_client_sends_must_be_left_out(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^job.{key} must be left out of a driven job"):
        read_job({**ENTRY, key: 3}, None)


def test_it_is_submitted_as_a_single_job() -> None:
    document = {**ENTRY, "base_model": BASE}
    (submission,) = split_submissions(document, Path.cwd()).submissions
    assert submission.job_spec().driven


def test_trainers_without_clients_refuse_it() -> None:
    document = {"base_model": BASE, "run": {"output_dir": "out"}, "jobs": [ENTRY]}
    with pytest.raises(ConfigError, match="driven of job 't' must be false here"):
        read_config(document, Path.cwd())
