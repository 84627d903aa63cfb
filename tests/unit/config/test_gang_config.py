"""The configuration of a super-model whose jobs come and go, and of a job that joins it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.job import DataSpec, JobSpec
from tlora_megatron.config.load import fit_job, read_gang_config
from tlora_megatron.config.reader import ConfigError

JOB = JobSpec(name="a", data=DataSpec(train="a.jsonl"), max_steps=1)


def sections(repo: Path, **others: Any) -> dict[str, Any]:
    model = {"config": str(repo / "configs/models/llama-3.1-8b.json"), "random_init": True}
    return {"base_model": model, **others}


def test_it_has_no_jobs_and_its_own_folder(repo: Path, tmp_path: Path) -> None:
    config = read_gang_config(sections(repo), repo, output_dir=tmp_path)
    assert (config.jobs, config.run.output_dir) == ((), str(tmp_path))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"jobs": []}, "jobs is not a known key"),
        ({"run": {"recompute": "auto"}}, r"run\.recompute must be none, selective or full"),
        ({"parallel": {"cp_size": 2, "cp_by_micro_batch": True}}, "must be false"),
        ({"parallel": {"replicas": "1xTP2 + 1xTP1"}}, r"parallel\.replicas must be alike"),
        ({"run": {"portion_tokens": 9, "micro_batch_tokens": 8}}, "at most run.micro_batch"),
    ],
)
def test_what_follows_from_all_jobs_is_refused(
    repo: Path, others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_gang_config(sections(repo, **others), repo, output_dir="out")


def test_a_job_gets_what_the_super_model_gives_it(repo: Path) -> None:
    run = {"portion_tokens": 512, "micro_batch_tokens": 1024}
    config = read_gang_config(sections(repo, run=run), repo, output_dir="out")
    assert fit_job(JOB, config).portion_tokens == 512
    with pytest.raises(ConfigError, match=r"job a\.portion_tokens must be at most"):
        fit_job(replace(JOB, portion_tokens=2048), config)
