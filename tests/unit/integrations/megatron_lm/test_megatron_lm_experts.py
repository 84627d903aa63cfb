"""What Megatron's arguments must say of routed experts, by flag and by job."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch

from tests.helpers.tiny_models import TINY_EXPERT_TYPES, TinyModelType
from tests.unit.integrations.megatron_lm.test_megatron_lm_arguments import (
    arguments as dense_arguments,
)
from tests.unit.integrations.megatron_lm.test_megatron_lm_arguments import spec_of
from tlora_megatron.integrations.megatron_lm import experts
from tlora_megatron.integrations.megatron_lm.arguments import launch_settings, spec_from_arguments
from tlora_megatron.model.spec import ModelSpec

ON_EXPERTS, ON_ATTENTION = ["gate_proj", "up_proj", "down_proj"], ["q_proj"]
WRONG: dict[str, Any] = {
    "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk_limited_devices": 2,
    "moe_router_force_biased": 1.0, "moe_latent_size": 32, "moe_mlp_glu_interleave_size": 8,
    "moe_shared_expert_glu_interleave_size": 8, "fp8": "e4m3", "fp4": "e2m1",
    "moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8",
}  # fmt: skip
"""Values of arguments that are refused; of all others True is."""


def arguments(spec: ModelSpec, folder: Path, **fields: Any) -> argparse.Namespace:
    """Megatron's arguments after validation, for two processes that share experts."""
    trainer = {
        "tensor_model_parallel_size": 1, "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1, "data_parallel_size": 2, "sequence_parallel": False,
        "params_dtype": torch.float32, "tlora_config": str(folder / "jobs.json"),
        "moe_shared_expert_gate": spec.shared_ffn_size is not None,
    }  # fmt: skip
    return dense_arguments(spec, **(trainer | fields))


def write_jobs(
    folder: Path, *targets: list[str], job: Mapping[str, Any] = {}, **sections: Any
) -> None:
    """Writes the file for the flag with a job a list of targets: a, b, ..."""
    (folder / "data.jsonl").write_text('{"text": "a b c"}\n')
    jobs = [
        {"name": name, "data": {"train": "data.jsonl"}, "max_steps": 3}
        | {"lora": {"rank": 4, "target_modules": names}, **job}
        for name, names in zip("ab", targets, strict=False)
    ]
    document = {"base_model": {"path": "base"}, "jobs": jobs, **sections}
    (folder / "jobs.json").write_text(json.dumps(document))


@pytest.mark.parametrize("kind", TINY_EXPERT_TYPES)
@pytest.mark.parametrize("normalizes", [False, True])
def test_arguments_describe_a_base(tmp_path: Path, kind: TinyModelType, normalizes: bool) -> None:
    fields = {} if kind == "mixtral" else {"norm_topk_prob": normalizes}
    spec = spec_of(tmp_path / "base", kind, **fields)
    found = spec_from_arguments(arguments(spec, tmp_path), vocab_size=spec.vocab_size)
    assert spec.experts is not None
    assert found.experts == replace(spec.experts, block="mlp", keeps_fp32=False)
    assert replace(found, model_type=kind, experts=spec.experts) == spec


def test_experts_in_some_layers_are_no_part_of_the_shape(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "base", "qwen3_moe")
    for frequency in (2, [0, 1]):
        args = arguments(spec, tmp_path, moe_layer_freq=frequency, ffn_hidden_size=96)
        found = spec_from_arguments(args, vocab_size=8)
        assert (found.experts, found.ffn_size) == (None, 96)
    args = arguments(spec, tmp_path, moe_layer_freq=[1, 1])
    assert spec_from_arguments(args, vocab_size=8).experts is not None
    for pattern, has_experts in (("*E*E", True), ("*E*-", False)):
        args = arguments(spec, tmp_path, hybrid_layer_pattern=pattern)
        assert (spec_from_arguments(args, vocab_size=8).experts is not None) == has_experts


def test_jobs_may_adapt_experts_of_a_known_base(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "base", "mixtral")
    write_jobs(tmp_path, ON_EXPERTS, ON_ATTENTION)
    settings = launch_settings(arguments(spec, tmp_path), tokenizer_size=8)
    assert settings.spec == spec
    assert settings.adapts_experts
    assert (settings.layout.ep_size, settings.layout.expert_tp) == (2, 1)
    assert settings.config.parallel.ep_size == 2
    write_jobs(tmp_path, ON_ATTENTION)
    assert not launch_settings(arguments(spec, tmp_path), tokenizer_size=8).adapts_experts
    write_jobs(tmp_path, ON_ATTENTION, parallel={"ep_size": 4})
    with pytest.raises(ValueError, match=r"ep_size must agree with --expert-model-parallel-size"):
        launch_settings(arguments(spec, tmp_path), tokenizer_size=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 8}, "--num-experts must be 4 as in .*, got 8"),
        ({"num_experts": None}, "--num-experts, in every layer, must be 4 as in .*, got absent"),
        ({"moe_router_topk": 1}, "--moe-router-topk must be 2 as in .*, got 1"),
        ({"moe_ffn_hidden_size": 32}, "--moe-ffn-hidden-size must be 48 as in .*, got 32"),
        ({"moe_router_pre_softmax": True}, "--moe-router-pre-softmax must be off as in .*, got on"),
        ({"moe_router_dtype": "fp64"}, "--moe-router-dtype must be absent as in .*, got fp64; log"),
        ({"moe_router_dtype": "fp32", "params_dtype": torch.bfloat16},
         "--moe-router-dtype must be absent as in .*, got fp32; logits in another precision"),
        ({"moe_shared_expert_intermediate_size": 64},
         "--moe-shared-expert-intermediate-size must be absent as in .*, got 64"),
    ],
)  # fmt: skip
def test_another_router_than_that_of_the_file_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    spec = spec_of(tmp_path / "base", "qwen3_moe")
    write_jobs(tmp_path, ON_ATTENTION)
    args = arguments(spec, tmp_path, **({"moe_router_dtype": "fp32"} | fields))
    with pytest.raises(ValueError, match=message):
        launch_settings(args, tokenizer_size=8)


def test_scores_that_megatron_rounds_are_refused_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path / "base", "qwen3_moe", norm_topk_prob=False)
    write_jobs(tmp_path, ON_ATTENTION)
    monkeypatch.setattr(megatron.core, "__version__", "0.17.1")
    launch_settings(arguments(spec, tmp_path), tokenizer_size=8)
    args = arguments(spec, tmp_path, params_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"--moe-router-pre-softmax must be off as in .* in bf16"):
        launch_settings(args, tokenizer_size=8)
    monkeypatch.setattr(megatron.core, "__version__", "0.18.0")
    launch_settings(args, tokenizer_size=8)


def test_a_shared_expert_is_gated_as_in_the_file(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "base", "qwen2_moe")
    write_jobs(tmp_path, ON_ATTENTION)
    launch_settings(arguments(spec, tmp_path), tokenizer_size=8)
    with pytest.raises(ValueError, match=r"--moe-shared-expert-gate must be on as in"):
        launch_settings(arguments(spec, tmp_path, moe_shared_expert_gate=False), tokenizer_size=8)
    write_jobs(tmp_path, ON_EXPERTS)  # as in `tlora train`
    with pytest.raises(ValueError, match=r"of job 'a' must not name routed experts over a base w"):
        launch_settings(arguments(spec, tmp_path), tokenizer_size=8)


@pytest.mark.parametrize("rule", experts.ROUTER, ids=lambda rule: rule.argument)
@pytest.mark.parametrize("known", [False, True])
def test_each_other_router_is_refused_by_its_flag(tmp_path: Path, rule: Any, known: bool) -> None:
    spec = spec_of(tmp_path / "base", "qwen3_moe")
    write_jobs(tmp_path, ON_ATTENTION if known else ON_EXPERTS)
    args = arguments(spec, tmp_path, **{rule.argument: WRONG.get(rule.argument, True)})
    where = "as in"
    if not known:
        where = "for job 'a', which adapts routed experts"
        (tmp_path / "base/config.json").write_text('{"model_type": "deepseek_v3"}')
        args.tokenizer_model = str(tmp_path / "base")
        write_jobs(tmp_path, ON_EXPERTS, base_model={})
    flag = "--" + rule.argument.replace("_", "-")
    with pytest.raises(ValueError, match=rf"^{flag} must be \w+ {where}.*, got .*; \w"):
        launch_settings(args, tokenizer_size=8)
    if not known:
        write_jobs(tmp_path, ON_ATTENTION, base_model={})
        assert not launch_settings(args, tokenizer_size=8).adapts_experts


@pytest.mark.parametrize("rule", experts.ADAPTERS, ids=lambda rule: rule.argument)
def test_what_excludes_adapters_on_experts_is_refused_by_job(tmp_path: Path, rule: Any) -> None:
    spec = spec_of(tmp_path / "base", "qwen3_moe")
    args = arguments(spec, tmp_path, **{rule.argument: WRONG.get(rule.argument, True)})
    write_jobs(tmp_path, ON_ATTENTION, ON_EXPERTS)
    with pytest.raises(ValueError, match=r"^--\S+ must be \w+ for job 'b', which adapts .*; \w"):
        launch_settings(args, tokenizer_size=8)
    write_jobs(tmp_path, ON_ATTENTION, ON_EXPERTS, run={"on_job_error": "skip"})
    settings = launch_settings(args, tokenizer_size=8)
    assert not settings.adapts_experts
    assert [job.name for job in settings.config.jobs] == ["a"]
    assert [error.name for error in settings.config.job_errors] == ["b"]
    write_jobs(tmp_path, ON_EXPERTS, run={"on_job_error": "skip"})
    with pytest.raises(ValueError, match=r"^jobs must hold at least one that can start, got --"):
        launch_settings(args, tokenizer_size=8)


@pytest.mark.parametrize(
    ("fields", "job", "sections", "message"),
    [
        ({"use_distributed_optimizer": True}, {}, {},
         "--use-distributed-optimizer must be off for job 'a', .*; replicas of experts are"),
        ({"expert_tensor_parallel_size": 2}, {}, {},
         "--expert-tensor-parallel-size must be 1 or 1 for job 'a', .*, got 2"),
        ({}, {"portion_tokens": 64}, {}, "portion_tokens of job a must be absent over a base with"),
        ({}, {}, {"run": {"deterministic": True}},
         "run.deterministic must be off with --tlora-con"),
    ],
)  # fmt: skip
def test_settings_of_runs_over_experts(
    tmp_path: Path, fields: dict[str, Any], job: Any, sections: Any, message: str
) -> None:
    spec = spec_of(tmp_path / "base", "qwen3_moe")
    write_jobs(tmp_path, ON_EXPERTS, job=job, **sections)
    with pytest.raises(ValueError, match=message):
        launch_settings(arguments(spec, tmp_path, **fields), tokenizer_size=8)
