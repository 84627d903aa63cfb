"""Targets over a base with routed experts, and what adapters on these may not be."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.tiny_models import make_tiny_model
from tlora_megatron.config.job import HF_TARGETS, DataSpec, JobSpec, LoraSpec
from tlora_megatron.model.backbone import expert_state_bytes, over_base, warn_of_expert_rank
from tlora_megatron.model.spec import ModelSpec, read_model_spec

OWN = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("base")
    make_tiny_model(path, "qwen3_moe", vocab_size=64, num_hidden_layers=2)
    return read_model_spec(path / "config.json")


def job(**lora: Any) -> JobSpec:
    return JobSpec(name="a", data=DataSpec(train="a.jsonl"), lora=LoraSpec(**lora), max_steps=1)


def test_names_of_an_mlp_mean_the_experts(spec: ModelSpec) -> None:
    default = over_base(job(), spec)
    assert default.lora.target_modules == (*HF_TARGETS[:4], *OWN)
    assert over_base(default, spec) == default
    fused = over_base(job(target_modules=("linear_qkv", "linear_fc1", "linear_fc2")), spec)
    assert fused.lora.expert_targets == ("experts.linear_fc1", "experts.linear_fc2")
    assert over_base(job(), replace(spec, experts=None)) == job()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"dropout": 0.1}, "lora.dropout of job 'a' must be 0 with targets on routed experts"),
        (
            {"parametrization": "block_diagonal", "num_blocks": 2},
            "lora.parametrization of job 'a' must be standard with targets on routed experts",
        ),
        (
            {"target_modules": ("gate_proj", "down_proj")},
            "must name gate_proj, up_proj and down_proj of routed experts, or down_proj alone",
        ),
        ({"target_modules": ("linear_fc1",)}, "PEFT loads no other adapter rightly, got experts"),
        (
            {"target_modules": ("q_proj",), "expert_rank": 2},
            "lora.expert_rank of job 'a' must be absent without targets on routed experts, got 2",
        ),
        (
            {"target_modules": ("q_proj",), "expert_sharing": "outer"},
            "lora.expert_sharing of job 'a' must be none without targets on .* experts, got outer",
        ),
    ],
)
def test_refused(spec: ModelSpec, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        over_base(job(**lora), spec)


def test_beside_a_shared_expert(spec: ModelSpec) -> None:
    beside = replace(spec, shared_ffn_size=80)
    with pytest.raises(ValueError, match="must not name routed experts over a base with shared"):
        over_base(job(), beside)
    shared = job(target_modules=("q_proj", "shared_expert.up_proj"))
    assert over_base(shared, beside) == shared


def test_a_dense_base_has_no_such_linears(spec: ModelSpec) -> None:
    dense = replace(spec, experts=None)
    with pytest.raises(ValueError, match="expert_rank of job 'a' must be absent without targets"):
        over_base(job(expert_rank=2), dense)
    with pytest.raises(ValueError, match=r"experts.gate_proj must be in the model, which has no"):
        dense.target_shape("experts.gate_proj")


def test_an_expert_rank_that_nobody_chose_is_told_with_its_bytes(
    spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    # 2 layers of 4 experts, 64 hidden features and 48 inside: gate, up and down of rank 16.
    expected = 18 * 2 * 4 * 3 * 16 * (64 + 48)
    chosen = over_base(job(expert_rank=16), spec)
    assert expert_state_bytes(chosen.lora, spec) == expected
    outer = over_base(job(expert_rank=16, expert_sharing="outer"), spec)
    assert expert_state_bytes(outer.lora, spec) == 18 * 2 * 3 * 16 * (64 + 4 * 48)
    with caplog.at_level(logging.WARNING):
        warn_of_expert_rank(chosen, spec)
        assert not caplog.text
        warn_of_expert_rank(over_base(job(), spec), spec)
    assert f"have rank 16, and their state takes {expected / 1e9:.3g} GB" in caplog.text
