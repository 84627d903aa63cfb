"""The backbone's own norm and core attention, and Megatron-core's replacements on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tlora_megatron.integrations.megatron import cpu
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")


@pytest.fixture
def config() -> TransformerConfig:
    cpu.install()
    return TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        normalization="RMSNorm",
    )


def make_attention(config: TransformerConfig, **options: float) -> PackedCoreAttention:
    return PackedCoreAttention(config, 1, AttnMaskType.causal, "self", **options)


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


def test_attention_stays_inside_documents(config: TransformerConfig) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(8, 1, heads, 8) for heads in (4, 2, 2))
    view = pack_micro_batch(
        [Document(slot=0, length=5), Document(slot=0, length=3)], num_slots=1, num_tokens=8
    )
    with use_micro_batch(view):
        out = make_attention(config)(query, key, value)
    row = torch.arange(8)
    document = row >= 5
    allowed = (row[:, None] >= row) & (document[:, None] == document)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    torch.testing.assert_close(out, expected.permute(2, 0, 1, 3).reshape(8, 1, 32))


def test_attention_without_a_micro_batch_is_refused(config: TransformerConfig) -> None:
    x = torch.zeros(4, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"must be bound by use_micro_batch, got none"):
        make_attention(config)(x, x, x)


def test_attention_refuses_masks(config: TransformerConfig) -> None:
    x, mask = torch.zeros(4, 1, 4, 8), torch.zeros(4, 4, dtype=torch.bool)
    view = pack_micro_batch([Document(slot=0, length=4)], num_slots=1, num_tokens=4)
    with (
        use_micro_batch(view),
        pytest.raises(ValueError, match=r"attention_mask, .* must be None"),
    ):
        make_attention(config)(x, x, x, mask)


def test_attention_refuses_dropout(config: TransformerConfig) -> None:
    with pytest.raises(ValueError, match=r"attention_dropout must be 0 .*, got 0.1"):
        make_attention(config, attention_dropout=0.1)


def test_cpu_replacements_are_installed_once() -> None:
    cpu.install()
    replaced = torch.cuda.current_device, schedules.torch
    cpu.install()
    assert (torch.cuda.current_device, schedules.torch) == replaced
    assert torch.cuda.current_device() == torch.device("cpu")
    assert schedules.torch.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert schedules.torch.Tensor is torch.Tensor


def test_cpu_generator_is_the_default_one() -> None:
    cpu.install()
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, torch.rand(2))
