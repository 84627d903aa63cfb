"""Rules over several keys: deterministic runs, portions, routed experts, driven jobs and gangs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.job import DataSpec, JobSpec
from tlora_megatron.config.load import config_to_dict, fit_job, read_config, read_gang_config
from tlora_megatron.config.parallel_rules import (
    check_run_over_experts,
    check_run_without_experts,
    settle_deterministic,
)
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.rules import portion_of
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.config.sections import job_to_dict, read_job


def settled(*jobs: dict[str, Any], parallel: dict[str, Any] | None = None, **run: Any) -> RunConfig:
    specs = [
        JobSpec(name=f"job{i}", data=DataSpec(train="a"), max_steps=1, **job)
        for i, job in enumerate(jobs or ({},))
    ]
    section = {"output_dir": "out", "micro_batch_tokens": 8192, "deterministic": True} | run
    return settle_deterministic(
        RunConfig(
            base_model=BaseModelSpec(path="base"),
            parallel=ParallelSpec(**(parallel or {})),
            run=RunSpec(**section),
            jobs=tuple(specs),
        )
    )


def test_without_the_key_nothing_changes() -> None:
    found = settled({}, deterministic=False, nano_batches="auto", parallel={"cp_size": 2})
    assert found.jobs[0].portion_tokens is None


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [({}, "auto"), ({"tp_size": 2}, "fold"), ({"tp_size": 2, "lora_sharding": "s_lora"}, "s_lora"),
     ({"tp_size": 2, "sequence_parallel": True}, "s_lora")],
)  # fmt: skip
def test_the_sharding_follows_no_predictions(parallel: dict[str, Any], expected: str) -> None:
    assert settled(parallel=parallel).parallel.lora_sharding == expected


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"nano_batches": "auto"}, "run.nano_batches must be a number: .*, got 'auto'; give 1 or"),
        ({"parallel": {"cp_size": 2}},
         "parallel.cp_size must be 1 with run.deterministic: .*, got 2; take pp_size"),
        ({"parallel": {"tp_size": 4}},
         "parallel.tp_size must be at most 2 with run.deterministic: .*, got 4; take pp_size"),
        ({"parallel": {"tp_size": 2, "lora_sharding": "rank_exchange"}},
         "parallel.lora_sharding must be fold, s_lora or auto with run.deterministic"),
        ({"parallel": {"tp_size": 2, "sequence_parallel": True, "lora_sharding": "fold"}},
         "must be s_lora or auto with run.deterministic and sequence_parallel"),
    ],
)  # fmt: skip
def test_what_lets_other_jobs_decide_is_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settled(**sections)
    assert re.search(sentence, str(raised.value)), raised.value


@pytest.mark.parametrize(
    ("lengths", "batch_size", "micro_batch_tokens", "expected"),
    [
        (((64, 1.0),), 16, 8192, 1024),  # an exact multiple gets no second step
        (((65, 1.0),), 16, 8192, 2048),
        (((1, 1.0),), 1, 8192, 1024),
        (((4096, 1.0),), 64, 8192, 4096),  # at most half the micro-batch
        (((4096, 1.0),), 64, 1500, 750),  # even where that is no multiple
        (((5, 1.0),), 1, 1, 1),
        (((10, 0.9), (1000, 0.1)), 16, 16384, 5120),  # 16 x 109 + 2 x 4 x 297
        (((100, 1 / 3), (200, 1 / 3), (300, 1 / 3)), 4, 8192, 2048),
    ],
)
def test_the_least_multiple_that_covers_a_batch(
    lengths: tuple[tuple[int, float], ...], batch_size: int, micro_batch_tokens: int, expected: int
) -> None:
    assert portion_of(lengths, batch_size, micro_batch_tokens) == expected


def config(tmp_path: Path, **sections: dict[str, Any]) -> RunConfig:
    (tmp_path / "a.jsonl").write_text("{}")
    job = {"name": "a", "data": {"train": "a.jsonl"}, "max_steps": 1, **sections.pop("job", {})}
    document = {
        "base_model": {"path": str(tmp_path)},
        "jobs": [job],
        **sections,
        "run": {"output_dir": "out", **sections.get("run", {})},
    }
    (tmp_path / "config.json").touch()
    return read_config(document, tmp_path)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tp_size": 4, "expert_tp_size": 2}, "expert_tp_size must be 1 or tp_size = 4, got 2"),
        ({"tp_size": 2, "expert_tp_size": 1}, "be tp_size = 2 without sequence_parallel.*got 1"),
        ({"ep_size": 2, "replicas": "2xTP1"}, "replicas must be absent with parallel.ep_size"),
        ({"ep_size": 0}, "ep_size must be .*1.*got 0"),
    ],
)
def test_sizes(tmp_path: Path, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, parallel=parallel)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"replicas": "1xTP2 + 1xTP1"}}, "parallel.replicas must be absent over"),
        ({"parallel": {"cp_size": 2, "cp_by_micro_batch": True}},
         "parallel.cp_by_micro_batch must be false over a base with routed experts"),
        ({"run": {"nano_batches": 2}}, "run.nano_batches must be 1 over"),
        ({"run": {"recompute": "auto"}, "parallel": {"ep_size": 2}},
         "run.recompute must be none, selective or full with parallel.ep_size above 1: proc"),
        ({"run": {"round_depth": 2}, "parallel": {"ep_size": 2}},
         "run.round_depth must be 1 with parallel.ep_size above 1: processes that share"),
        ({"run": {"deterministic": True}}, "run.deterministic must be false over .*: an expert's"),
        ({"parallel": {"shard_optimizer": True, "ep_size": 2}},
         "shard_optimizer must be false with ep_size above 1: job a adapts gate_proj of routed"),
        ({"job": {"portion_tokens": 64}}, "portion_tokens of job a must be absent over a base"),
    ],
)  # fmt: skip
def test_over_experts(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run_over_experts(config(tmp_path, **sections))


def test_rounds_of_one_process_s_own_experts_may_differ(tmp_path: Path) -> None:
    run = {"recompute": "auto", "round_depth": 2}
    own = config(tmp_path, run=run, job={"lora": {"target_modules": ["q_proj"]}})
    check_run_over_experts(own)
    check_run_over_experts(config(tmp_path, run=run))
    message = "be none, selective or full over a base of model_type gpt_oss, whose memory is not"
    with pytest.raises(ConfigError, match=message):
        check_run_over_experts(own, unpredicted="gpt_oss")


@pytest.mark.parametrize("key", ["ep_size", "expert_tp_size"])
def test_over_a_dense_base(tmp_path: Path, key: str) -> None:
    parallel = {key: 2, "tp_size": 2}
    with pytest.raises(ConfigError, match=f"{key} must be .* over a base without routed experts"):
        check_run_without_experts(config(tmp_path, parallel=parallel).parallel)
    check_run_without_experts(config(tmp_path).parallel)


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


def test_trainers_without_clients_refuse_it() -> None:
    document = {"base_model": BASE, "run": {"output_dir": "out"}, "jobs": [ENTRY]}
    with pytest.raises(ConfigError, match="driven of job 't' must be false here"):
        read_config(document, Path.cwd())


def test_pairs_are_refused_in_somebody_else_s_trainer_and_other_losses_by_name(
    tmp_path: Path,
) -> None:
    taken = config(tmp_path, job={"preference": {"loss": "simpo"}})
    document = config_to_dict(taken)
    with pytest.raises(ConfigError, match="preference of job 'a' must be left out in somebody"):
        read_config(document, tmp_path, targets=None)
    with pytest.raises(ConfigError, match=r"preference.loss must be one of dpo, orpo, simpo, got"):
        config(tmp_path, job={"preference": {"loss": "kto"}})


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
def test_what_follows_from_all_jobs(repo: Path, others: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_gang_config(sections(repo, **others), repo, output_dir="out")


def test_a_job_gets_what_the_super_model_gives_it(repo: Path) -> None:
    run = {"portion_tokens": 512, "micro_batch_tokens": 1024}
    config = read_gang_config(sections(repo, run=run), repo, output_dir="out")
    assert fit_job(JOB, config).portion_tokens == 512
    with pytest.raises(ConfigError, match=r"job a\.portion_tokens must be at most"):
        fit_job(replace(JOB, portion_tokens=2048), config)
