"""Parts of layers: norm, rotary embedding, core attention, and settings under which our kernels
run.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.helpers.layout_sites import SPEC
from tlora_megatron.integrations.megatron import cpu
from tlora_megatron.integrations.megatron.layer.conditions import (
    FP8,
    HEAD,
    LAYER,
    Condition,
    why_not_config,
)
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import (
    PackedRotaryEmbedding,
    RMSNorm,
)
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.rotary import inverse_frequencies
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")


@pytest.fixture
def config() -> TransformerConfig:
    cpu.install()
    return TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, normalization="RMSNorm",
    )  # fmt: skip


def make_attention(config: TransformerConfig, **options: float) -> PackedCoreAttention:
    return PackedCoreAttention(config, 1, AttnMaskType.causal, "self", **options)


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rounds_as_hugging_face(config: TransformerConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = RMSNorm(config, 63, eps=1e-5).to(dtype), LlamaRMSNorm(63, eps=1e-5).to(dtype)
    weight = torch.randn(63).to(dtype)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
    x = (torch.randn(5, 1, 63) * 3).to(dtype)
    tolerance = 0 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance)


@ON_CPU
def test_what_attention_refuses(config: TransformerConfig) -> None:
    x, mask = torch.zeros(4, 1, 4, 8), torch.zeros(4, 4, dtype=torch.bool)
    attention = make_attention(config)
    with pytest.raises(RuntimeError, match=r"must be bound by use_micro_batch, got none"):
        attention(x, x, x)
    view = pack_micro_batch([Document(slot=0, length=4)], num_slots=1, num_tokens=4)
    with use_micro_batch(view), pytest.raises(ValueError, match=r"attention_mask, .* must be None"):
        attention(x, x, x, mask)
    with pytest.raises(ValueError, match=r"attention_dropout must be 0 .*, got 0.1"):
        make_attention(config, attention_dropout=0.1)


@ON_CPU
def test_cpu_generator_is_the_default_one() -> None:
    cpu.install()
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, torch.rand(2))


LLAMA_31: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_32 = LLAMA_31 | {"factor": 32.0}
DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def make_spec(rope: dict[str, Any], head_dim: int) -> ModelSpec:
    scaling = rope if rope["rope_type"] == "llama3" else None
    return replace(SPEC, head_dim=head_dim, rope_theta=rope["rope_theta"], rope_scaling=scaling)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rope", [DEFAULT, LLAMA_31, LLAMA_32])
def test_frequencies_are_hugging_faces(rope: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=dict(rope),
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(inverse_frequencies(make_spec(rope, head_dim)), expected)


def test_rotation_rounds_as_hugging_face_in_bf16() -> None:
    view = pack_micro_batch([Document(slot=0, length=40)], num_slots=1, num_tokens=40)
    x = torch.randn(40, 1, 2, 64).bfloat16()
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(DEFAULT))
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(40)[None])
    expected, _ = apply_rotary_pos_emb(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), cos, sin)
    actual = PackedRotaryEmbedding(make_spec(DEFAULT, 64))(x, view)
    assert torch.equal(actual, expected.permute(2, 0, 1, 3))


ALL = (*LAYER, *FP8, *HEAD)
SAYS = {
    "tp_comm_overlap": (True,
     "tp_comm_overlap is True: it overlaps inside Transformer Engine's linears"),
    "activation_func": (F.gelu, "activation_func is gelu: our kernels compute something else"),
    "qk_l2_norm": (True, "qk_l2_norm is True: our kernels do not compute it yet"),
}  # fmt: skip


def is_expected(condition: Condition, version: str) -> bool:
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return found >= condition.since


def test_every_field_is_one_of_the_installed_version() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    for condition in ALL:
        expected = is_expected(condition, megatron.core.__version__)
        assert (condition.field in fields) == expected, condition


@pytest.mark.megatron_lm
def test_every_field_is_one_of_the_checkout() -> None:
    core = Path(os.environ["MEGATRON_LM_PATH"]) / "megatron" / "core"
    sources = (core / "transformer/transformer_config.py", core / "model_parallel_config.py")
    fields = {
        item.target.id
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    info = (core / "package_info.py").read_text()
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\d+)", info, re.MULTILINE))
    for condition in ALL:
        expected = is_expected(condition, version)
        assert (condition.field in fields) == expected, condition


def test_fields_that_a_version_lacks_hold() -> None:
    assert why_not_config(SimpleNamespace(), ALL) is None


@pytest.mark.parametrize("condition", ALL, ids=lambda c: c.field)
def test_each_condition_alone_is_the_reason(condition: Condition) -> None:
    table = next(table for table in (LAYER, FP8, HEAD) if condition in table)
    config = SimpleNamespace(**{c.field: c.allowed[0] for c in table})
    assert why_not_config(config, table) is None
    value, sentence = SAYS.get(condition.field, ("another", None))
    setattr(config, condition.field, value)
    reason = why_not_config(config, table)
    assert reason == (sentence or f"{condition.field} is another: {condition.why}")
    for half in ("attention", "mlp"):
        applies = condition.half in (None, half)
        assert why_not_config(config, table, half) == (reason if applies else None)
