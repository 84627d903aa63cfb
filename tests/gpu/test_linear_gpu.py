"""The multi-adapter linear on a GPU: grouped GEMMs and generated dropout against fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.helpers.linear_case import JOBS, SPEC, TOLERANCE, WORKLOADS, Case, error
from tlora_megatron.job import LoraSpec

pytestmark = pytest.mark.gpu

WIDE = dataclasses.replace(
    SPEC, hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=768
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("linear", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_every_output_and_gradient_equals_the_reference(
    linear: str, workload: str, training: bool, dtype: torch.dtype
) -> None:
    case = Case(linear, dtype, spec=WIDE, device="cuda")
    lengths = WORKLOADS[workload]
    num_tokens = sum(lengths) + 6
    view = case.view(lengths, num_tokens=num_tokens, training=training)
    x, dy = (
        case.draw(num_tokens, 1, case.site.in_size),
        case.draw(num_tokens, 1, case.site.out_size),
    )
    # What an unwritten row would show: freed blocks are handed out again.
    torch.full((num_tokens, 4096), float("nan"), dtype=dtype, device="cuda")
    actual, expected = case.run(x, dy, view), case.reference(x, dy, view)
    for name, value in expected.items():
        got = actual[name].reshape(value.shape)
        assert torch.isfinite(got).all(), name
        assert error(got, value) < TOLERANCE[dtype], name


def test_columns_that_begin_between_16_bytes() -> None:
    """torch's grouped GEMM refuses them: up_proj's begin at the twelfth."""
    spec = dataclasses.replace(WIDE, ffn_size=12)
    case = Case("linear_fc1", torch.bfloat16, spec=spec, loras=JOBS[3:], device="cuda")
    view = case.view((9,), num_tokens=16, training=False)
    x, dy = case.draw(16, 1, case.site.in_size), case.draw(16, 1, case.site.out_size)
    actual, expected = case.run(x, dy, view), case.reference(x, dy, view)
    for name, value in expected.items():
        got = actual[name].reshape(value.shape)
        assert error(got, value) < TOLERANCE[torch.bfloat16], name


def test_more_adapters_than_one_grouped_gemm_takes() -> None:
    loras = [LoraSpec(rank=8, alpha=8, target_modules=("o_proj",))] * 1023
    case = Case("linear_proj", torch.bfloat16, spec=WIDE, loras=loras, device="cuda")
    lengths = [0] * 1023
    lengths[5], lengths[1022] = 7, 9
    view = case.view(lengths, num_tokens=24, training=False)
    x, dy = case.draw(24, 1, case.site.in_size), case.draw(24, 1, case.site.out_size)
    actual, expected = case.run(x, dy, view), case.reference(x, dy, view)
    for name in ("y", "dx", "job5.layers.1.o_proj.lora_a", "job1022.layers.1.o_proj.lora_b"):
        got = actual[name].reshape(expected[name].shape)
        assert error(got, expected[name]) < TOLERANCE[torch.bfloat16], name


def test_gradients_are_the_same_bits_from_run_to_run() -> None:
    case = Case("linear_qkv", torch.bfloat16, spec=WIDE, loras=JOBS, device="cuda")
    view = case.view(WORKLOADS["skewed"], num_tokens=384, training=True)
    x, dy = case.draw(384, 1, case.site.in_size), case.draw(384, 1, case.site.out_size)
    first, second = case.run(x, dy, view), case.run(x, dy, view)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
