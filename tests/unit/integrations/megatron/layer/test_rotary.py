"""Rotation frequencies are Hugging Face's to the bit, and positions are the bound micro-batch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.helpers.layout_sites import SPEC
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import PackedRotaryEmbedding
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.rotary import inverse_frequencies
from tlora_megatron.ops.routing import Document, pack_micro_batch

LLAMA_31: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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


def test_positions_restart_at_every_document_and_follow_the_ranks_rows() -> None:
    spec = make_spec(DEFAULT, 8)
    documents = [Document(slot=0, length=5), Document(slot=0, length=3)]
    rotary = PackedRotaryEmbedding(spec)
    view = pack_micro_batch(documents, num_slots=1, num_tokens=8, cp_rank=1, cp_size=2)
    x = torch.randn(4, 1, 3, 8)
    # Rank 1 of 2 holds packed rows 2-5; the second document begins at row 5.
    positions = torch.tensor([[2, 3, 4, 0]])
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=dict(DEFAULT))
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    expected, _ = apply_rotary_pos_emb(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), cos, sin)
    assert torch.equal(rotary(x, view), expected.permute(2, 0, 1, 3))


def test_rotation_rounds_as_hugging_face_in_bf16() -> None:
    view = pack_micro_batch([Document(slot=0, length=40)], num_slots=1, num_tokens=40)
    x = torch.randn(40, 1, 2, 64).bfloat16()
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(DEFAULT))
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(40)[None])
    expected, _ = apply_rotary_pos_emb(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), cos, sin)
    actual = PackedRotaryEmbedding(make_spec(DEFAULT, 64))(x, view)
    assert torch.equal(actual, expected.permute(2, 0, 1, 3))
