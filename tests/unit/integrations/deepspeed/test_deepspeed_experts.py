"""Models with routed experts under DeepSpeed: what may be adapted, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.tiny_models import TINY_EXPERT_TYPES, TinyModelType, randomize, tiny_config
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.integrations.deepspeed import model as attention
from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig
from tlora_megatron.integrations.deepspeed.discover import check_run_over_experts, model_spec
from tlora_megatron.integrations.deepspeed.engine import check_packing, prepare_output_layer
from tlora_megatron.integrations.deepspeed.model import (
    require_grad_from_embedding,
    use_packed_attention,
)
from tlora_megatron.parallel.groups import ParallelGroups


def build(model_type: TinyModelType, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, num_hidden_layers=2))
    randomize(model, seed=0)
    return model.to(dtype)


@pytest.mark.parametrize("model_type", TINY_EXPERT_TYPES)
def test_attention_alone_may_be_adapted(model_type: TinyModelType) -> None:
    spec = model_spec(build(model_type))
    assert spec.peft_targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    for target, reason in (
        ("gate_proj", "routed experts carry no adapters"),
        ("gate_up_proj", "routed experts carry no adapters"),
        ("gate", "routers carry no adapters"),
        ("shared_expert_gate", "it only weighs the shared expert"),
    ):
        with pytest.raises(ValueError, match=f"got '{target}': {reason}"):
            spec.target_shape(target)


def test_gpt_oss_is_refused() -> None:
    message = "the base of a DeepSpeed run must not be of model_type gpt_oss yet, got one; train"
    with pytest.raises(ValueError, match=message):
        model_spec(build("gpt_oss"))


def test_what_a_run_cannot_keep_is_refused() -> None:
    run = RunConfig(
        base_model=BaseModelSpec(path="unread"),
        parallel=ParallelSpec(),
        run=RunSpec(output_dir="unused"),
        jobs=(),
    )
    config = DeepSpeedConfig(
        engine={}, run=run, stage=0, tp_size=1, offload_optimizer=False, changes=()
    )
    same_bits = replace(run, run=replace(run.run, deterministic=True))
    experts, dense = build("mixtral"), build("llama")
    check_run_over_experts(experts, config)
    for asked, message in (
        (replace(config, tp_size=2), "autotp_size must be 1 over a base with routed .*, got 2"),
        (replace(config, run=same_bits), "run.deterministic must be false over a base with routed"),
    ):
        check_run_over_experts(dense, asked)
        with pytest.raises(ValueError, match=message):
            check_run_over_experts(experts, asked)


def check(model: Any, groups: ParallelGroups) -> None:
    spec, plain = model_spec(model), model.config._attn_implementation
    model.requires_grad_(False)
    require_grad_from_embedding(model)
    use_packed_attention(model)
    prepare_output_layer(model, spec.vocab_size, groups)
    check_packing(model, spec, groups, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", TINY_EXPERT_TYPES)
def test_packing_is_exact(
    model_type: TinyModelType, dtype: torch.dtype, groups: ParallelGroups
) -> None:
    check(build(model_type, dtype), groups)


def test_attention_across_documents_is_found_beside_other_experts(
    groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leak(q: Any, k: Any, v: Any, view: Any, scale: float) -> torch.Tensor:
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    monkeypatch.setattr(attention, "attend_documents", leak)
    with pytest.raises(ValueError, match="MixtralForCausalLM must keep the documents of"):
        check(build("mixtral", torch.bfloat16), groups)
