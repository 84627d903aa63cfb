"""Experts of a `config.json`, and adapters on them: sizes, names, and what is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import make_tiny_model
from tlora_megatron.config.job import EXPERT_TARGETS, HF_TARGETS, DataSpec, JobSpec, LoraSpec
from tlora_megatron.model.backbone import expert_state_bytes, over_base, warn_of_expert_rank
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ExpertsSpec, ModelSpec, refuse_experts

MODELS = Path(__file__).parents[3] / "configs" / "models"
QWEN3_30B, MIXTRAL, QWEN15 = (
    json.loads((MODELS / f"{name}.json").read_text())
    for name in ("qwen3-30b-a3b", "mixtral-8x7b", "qwen1.5-moe-a2.7b")
)


def read(tmp_path: Path, base: dict[str, Any], **fields: Any) -> ModelSpec:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | fields))
    return read_model_spec(path)


def test_qwen(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_30B)
    assert spec.experts == ExpertsSpec(num_experts=128, top_k=8, ffn_size=768, normalizes=True)
    assert spec.ffn_size == 768
    assert spec.experts.stored(7, "up_proj") == "mlp.experts.7.up_proj.weight"
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert spec.peft_targets == (*attention, *EXPERT_TARGETS)


def test_mixtral(tmp_path: Path) -> None:
    spec = read(tmp_path, MIXTRAL)
    assert spec.experts is not None
    assert (spec.experts.num_experts, spec.experts.top_k, spec.ffn_size) == (8, 2, 14336)
    assert (spec.norm_eps, spec.rope_theta) == (1e-5, 1e6)
    assert spec.experts.stored(3, "down_proj") == "block_sparse_moe.experts.3.w2.weight"
    assert spec.experts.stored_router == "block_sparse_moe.gate.weight"


def test_a_shared_expert(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN15)
    assert spec.experts == ExpertsSpec(num_experts=60, top_k=4, ffn_size=1408, normalizes=False)
    assert (spec.shared_ffn_size, spec.qkv_bias, spec.sliding_window) == (5632, True, None)
    assert spec.peft_targets[7:] == tuple(f"shared_expert.{p}_proj" for p in ("gate", "up", "down"))
    assert not read(tmp_path, QWEN15, qkv_bias=False).qkv_bias
    with pytest.raises(ValueError, match="shared_expert_intermediate_size must be an integer of"):
        read(tmp_path, QWEN15, shared_expert_intermediate_size=0)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_has_two_names(tmp_path: Path, name: str) -> None:
    base = {key: value for key, value in QWEN3_30B.items() if key != "num_experts"}
    spec = read(tmp_path, base, **{name: 64})
    assert spec.experts is not None
    assert spec.experts.num_experts == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_local_experts": 4}, "num_local_experts and num_experts must be the same, got 4 and"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step must be 1 \(a base has experts in ever"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers must be \[\] .*got \[0\] in .*config.json"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be at most 128, got 129"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be an integer of at least 1"),
        ({"num_experts": 2.5}, "num_experts must be an integer of at least 1, got 2.5"),
        ({"model_type": "deepseek_v3"}, "model_type must be one of llama.*, got 'deepseek_v3'"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, r"router_jitter_noise must be 0 .*, got 0.1"),
    ],
)
def test_refusals(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, QWEN3_30B, **fields)


@pytest.mark.parametrize("target", ["gate_proj", "down_proj", "linear_fc1"])
def test_targets_of_experts_have_names_of_their_own(tmp_path: Path, target: str) -> None:
    spec = read(tmp_path, QWEN3_30B)
    assert spec.target_shape(f"experts.{target}") in ((768, 2048), (2048, 768), (1536, 2048))
    with pytest.raises(ValueError, match=r"must be among q_proj, .* with routed experts, got"):
        spec.target_shape(target)


def test_where_only_dense_bases_are_known(tmp_path: Path) -> None:
    refuse_experts(None, "the base of a plan")
    with pytest.raises(ValueError, match="the base of a plan must have no routed experts yet, got"):
        refuse_experts(read(tmp_path, QWEN3_30B).experts, "the base of a plan")


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
    dense = replace(spec, experts=None)
    assert over_base(job(), dense) == job()
    with pytest.raises(ValueError, match=r"experts.gate_proj must be in the model, which has no"):
        dense.target_shape("experts.gate_proj")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"dropout": 0.1}, "lora.dropout of job 'a' must be 0 with targets on routed experts"),
        ({"parametrization": "block_diagonal", "num_blocks": 2},
         "lora.parametrization of job 'a' must be standard with targets on routed experts"),
        ({"target_modules": ("gate_proj", "down_proj")},
         "must name gate_proj, up_proj and down_proj of routed experts, or down_proj alone"),
        ({"target_modules": ("linear_fc1",)}, "PEFT loads no other adapter rightly, got experts"),
        ({"target_modules": ("q_proj",), "expert_rank": 2},
         "lora.expert_rank of job 'a' must be absent without targets on routed experts, got 2"),
        ({"target_modules": ("q_proj",), "expert_sharing": "outer"},
         "lora.expert_sharing of job 'a' must be none without targets on .* experts, got outer"),
    ],
)  # fmt: skip
def test_refused(spec: ModelSpec, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        over_base(job(**lora), spec)


def test_beside_a_shared_expert(spec: ModelSpec) -> None:
    beside = replace(spec, shared_ffn_size=80)
    with pytest.raises(ValueError, match="must not name routed experts over a base with shared"):
        over_base(job(), beside)
    shared = job(target_modules=("q_proj", "shared_expert.up_proj"))
    assert over_base(shared, beside) == shared


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
