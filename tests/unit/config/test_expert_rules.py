"""What `parallel.ep_size` and a base with routed experts refuse, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.load import read_config
from tlora_megatron.config.parallel_rules import check_run_over_experts, check_run_without_experts
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import RunConfig


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
        (
            {"parallel": {"cp_size": 2, "cp_by_micro_batch": True}},
            "parallel.cp_by_micro_batch must be false over a base with routed experts",
        ),
        ({"run": {"nano_batches": 2}}, "run.nano_batches must be 1 over"),
        (
            {"run": {"recompute": "auto"}, "parallel": {"ep_size": 2}},
            "run.recompute must be none, selective or full with parallel.ep_size above 1: proc",
        ),
        (
            {"run": {"round_depth": 2}, "parallel": {"ep_size": 2}},
            "run.round_depth must be 1 with parallel.ep_size above 1: processes that share",
        ),
        ({"run": {"deterministic": True}}, "run.deterministic must be false over .*: an expert's"),
        (
            {"parallel": {"shard_optimizer": True, "ep_size": 2}},
            "shard_optimizer must be false with ep_size above 1: job a adapts gate_proj of routed",
        ),
        ({"job": {"portion_tokens": 64}}, "portion_tokens of job a must be absent over a base"),
    ],
)
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
