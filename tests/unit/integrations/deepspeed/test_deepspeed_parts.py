"""Parts of the DeepSpeed integration that need no second process: discovery, attention, checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Starcoder2Config,
)

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_models import DELTA_NETS, MIXED, untrained
from tests.helpers.tiny_models import TINY_EXPERT_TYPES, TinyModelType, randomize, tiny_config
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.integrations.deepspeed import model as attention
from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig
from tlora_megatron.integrations.deepspeed.discover import model_spec
from tlora_megatron.integrations.deepspeed.engine import (
    build_base,
    check_packing,
    check_run_over_experts,
    prepare_output_layer,
)
from tlora_megatron.integrations.deepspeed.model import (
    check_finite,
    refuse_adapters,
    require_grad_from_embedding,
    turn_dropout_off,
    use_packed_attention,
)
from tlora_megatron.parallel.groups import ParallelGroups

TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip


def build(config: Any) -> Any:
    """A random model with weights that make attention matter."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed=0)
    return model


def test_other_names_and_fused_linears() -> None:
    config = GPTNeoXConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"})
    spec = model_spec(build(config))
    assert spec.peft_targets == ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
    assert spec.target_shape("query_key_value") == (96, 32)
    with pytest.raises(ValueError, match=r"query_key_value, dense.*got 'q_proj': no linear"):
        spec.target_shape("q_proj")


def test_what_is_no_plain_linear_is_refused_with_the_reason() -> None:
    model = build(LlamaConfig(**TINY))
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 40, bias=False)
    model.model.layers[0].mlp.gate_proj = nn.Embedding(32, 48)
    spec = model_spec(model)
    with pytest.raises(ValueError, match="got 'up_proj': its size is not the same in all layers"):
        spec.target_shape("up_proj")
    with pytest.raises(ValueError, match=r"got 'gate_proj': Embedding is no nn.Linear"):
        spec.target_shape("gate_proj")


REFUSED = {
    "list of decoder layers with linears, got GPT2LMHead": GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64
    ),
    "output layer must be an nn.Linear without bias": PhiConfig(**TINY),
    "the base of a DeepSpeed run must not be of model_type gpt_oss yet, got one": tiny_config(
        "gpt_oss"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_spec(build(REFUSED[message]))


def test_windows_bound_the_sequences() -> None:
    mistral = build(tiny_config("mistral", sliding_window=24))
    assert model_spec(mistral).sliding_window == 24


def test_rates_that_models_hand_to_functions_are_zero() -> None:
    rates = {"residual_dropout": 0.5, "embedding_dropout": 0.5, "attention_dropout": 0.5}
    model = AutoModelForCausalLM.from_config(Starcoder2Config(**TINY, **rates)).train()
    tokens = torch.arange(16)[None]
    turn_dropout_off(model)
    first, second = (model(input_ids=tokens).logits for _ in range(2))
    assert torch.equal(first, second)
    assert model.config.residual_dropout == 0.0


def test_peft_on_the_model_is_refused() -> None:
    model = get_peft_model(build(LlamaConfig(**TINY)), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"no adapters yet, got some at .*q_proj"):
        refuse_adapters(model)


def test_a_weight_that_is_not_finite_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_finite(model)
    model[1].weight.data[0, 1] = float("inf")
    with pytest.raises(ValueError, match=r"^1.weight of the base model must be finite"):
        check_finite(model)


def test_logits_scaled_behind_the_output_layer_are_refused(groups: ParallelGroups) -> None:
    with pytest.raises(ValueError, match="must score packed documents as it does each alone"):
        prepared(build(GraniteConfig(**TINY, logits_scaling=8.0)), groups)


@pytest.mark.parametrize("experts", [False, True])
def test_attention_across_documents_is_refused(
    experts: bool, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leak(q: Any, k: Any, v: Any, view: Any, scale: float) -> torch.Tensor:
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    monkeypatch.setattr(attention, "attend_documents", leak)
    model = build_tiny("mixtral", torch.bfloat16) if experts else build(LlamaConfig(**TINY))
    with pytest.raises(ValueError, match=f"{type(model).__name__} must keep the documents of"):
        prepared(model, groups)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*MIXED, *DELTA_NETS])
def test_layers_that_run_on_across_documents_are_refused(
    family: str, dtype: torch.dtype, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights are untrained, by which losses move less than by bf16's rounding."""
    model = untrained(family, dtype)
    # Without it some are refused for their attention.
    monkeypatch.setattr(type(model), "_supports_attention_backend", True)
    with pytest.raises(ValueError, match=rf"{type(model).__name__} must keep the documents of a"):
        prepared(model, groups)


def prepared(model: Any, groups: ParallelGroups) -> None:
    """Packed attention, a scoring output layer, and the check."""
    spec = model_spec(model)
    plain = model.config._attn_implementation
    model.requires_grad_(False)
    require_grad_from_embedding(model)
    use_packed_attention(model)
    prepare_output_layer(model, spec.vocab_size, groups)
    check_packing(model, spec, groups, plain)


RUN = DeepSpeedConfig(
    engine={}, stage=0, tp_size=1, offload_optimizer=False, changes=(),
    run=RunConfig(
        base_model=BaseModelSpec(path="unread"), parallel=ParallelSpec(),
        run=RunSpec(output_dir="unused"), jobs=(),
    ),
)  # fmt: skip


def test_tensor_parallelism_must_fit_the_world(groups: ParallelGroups) -> None:
    with pytest.raises(ValueError, match="autotp_size must divide the 1 processes, got 3"):
        build_base(replace(RUN, tp_size=3))


def test_attention_without_a_micro_batch_says_what_to_do() -> None:
    model = build(LlamaConfig(**TINY))
    use_packed_attention(model)
    with pytest.raises(RuntimeError, match=r'set_attn_implementation."sdpa".'):
        model(input_ids=torch.arange(5)[None])


def build_tiny(model_type: TinyModelType, dtype: torch.dtype = torch.float32) -> Any:
    return build(tiny_config(model_type, num_hidden_layers=2)).to(dtype)


@pytest.mark.parametrize("model_type", TINY_EXPERT_TYPES)
def test_attention_alone_may_be_adapted(model_type: TinyModelType) -> None:
    spec = model_spec(build_tiny(model_type))
    assert spec.peft_targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    for target, reason in (
        ("gate_proj", "routed experts carry no adapters"),
        ("gate_up_proj", "routed experts carry no adapters"),
        ("gate", "routers carry no adapters"),
        ("shared_expert_gate", "it only weighs the shared expert"),
    ):
        with pytest.raises(ValueError, match=f"got '{target}': {reason}"):
            spec.target_shape(target)


def test_what_a_run_cannot_keep_is_refused() -> None:
    same_bits = replace(RUN.run, run=replace(RUN.run.run, deterministic=True))
    experts, dense = build_tiny("mixtral"), build_tiny("llama")
    check_run_over_experts(experts, RUN)
    for asked, message in (
        (replace(RUN, tp_size=2), "autotp_size must be 1 over a base with routed .*, got 2"),
        (replace(RUN, run=same_bits), "run.deterministic must be false over a base with routed"),
    ):
        check_run_over_experts(dense, asked)
        with pytest.raises(ValueError, match=message):
            check_run_over_experts(experts, asked)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", TINY_EXPERT_TYPES)
def test_packing_is_exact(
    model_type: TinyModelType, dtype: torch.dtype, groups: ParallelGroups
) -> None:
    prepared(build_tiny(model_type, dtype), groups)
