"""The multi-adapter linear on a GPU, with every implementation that runs there, against fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.helpers.block_case import against_dense, blocks
from tests.helpers.fp8_ranks import LAYOUT, Ranks
from tests.helpers.linear_case import JOBS, SPEC, TOLERANCE, WORKLOADS, Case, error
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.shardings import FoldStrategy
from tlora_megatron.ops.lora.linear_ops import LinearOps
from tlora_megatron.ops.quantised.rows import GROUP
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight
from tlora_megatron.ops.routing import MicroBatchView

pytestmark = pytest.mark.gpu

WIDE = dataclasses.replace(
    SPEC, hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=768
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("linear", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_every_output_and_gradient_equals_the_reference(
    linear: str, workload: str, training: bool, dtype: torch.dtype, ops: LinearOps
) -> None:
    case = Case(linear, dtype, spec=WIDE, device="cuda", ops=ops)
    lengths = WORKLOADS[workload]
    check(case, case.view(lengths, num_tokens=sum(lengths) + 6, training=training))


def check(case: Case, view: MicroBatchView, *names: str) -> None:
    """Output and gradients, or those named, are the reference's."""
    x, dy = inputs(case, view.num_tokens)
    # What an unwritten row would show: freed blocks are handed out again.
    torch.full((view.num_tokens, 4096), float("nan"), dtype=case.dtype, device="cuda")
    actual, expected = case.run(x, dy, view), case.reference(x, dy, view)
    for name in names or expected:
        got = actual[name].reshape(expected[name].shape)
        assert torch.isfinite(got).all(), name
        assert error(got, expected[name]) < TOLERANCE[case.dtype], name


def inputs(case: Case, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws x and the gradient of y."""
    return case.draw(num_tokens, 1, case.site.in_size), case.draw(num_tokens, 1, case.site.out_size)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("linear", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_block_diagonal_jobs_equal_those_of_dense_factors(
    linear: str, training: bool, dtype: torch.dtype, ops: LinearOps
) -> None:
    loras = (
        blocks(32, 4, alpha=5, dropout=0.2),
        LoraSpec(rank=24, alpha=3, dropout=0.1),
        blocks(12, 2, alpha=9, use_rslora=True),
        blocks(64, 8, alpha=64),
    )
    pairs = against_dense(
        linear, loras, (90, 300, 17, 128), spec=WIDE, training=training, dtype=dtype,
        device="cuda", ops=ops,
    )  # fmt: skip
    for name, (got, expected) in pairs.items():
        assert expected.any(), name
        assert error(got, expected) < TOLERANCE[dtype], name


def test_columns_that_begin_between_16_bytes(ops: LinearOps) -> None:
    """TMA and wide loads refuse them: up_proj's begin at the twelfth."""
    spec = dataclasses.replace(WIDE, ffn_size=12)
    case = Case("linear_fc1", torch.bfloat16, spec=spec, loras=JOBS[3:], device="cuda", ops=ops)
    check(case, case.view((9,), num_tokens=16, training=False))


def test_a_thousand_adapters_of_which_two_have_rows(ops: LinearOps) -> None:
    loras = [LoraSpec(rank=8, alpha=8, target_modules=("o_proj",))] * 1023
    case = Case("linear_proj", torch.bfloat16, spec=WIDE, loras=loras, device="cuda", ops=ops)
    lengths = [0] * 1023
    lengths[5], lengths[1022] = 7, 9
    names = ("y", "dx", "job5.layers.1.o_proj.lora_a", "job1022.layers.1.o_proj.lora_b")
    check(case, case.view(lengths, num_tokens=24, training=False), *names)


def test_gradients_are_the_same_bits_from_run_to_run(ops: LinearOps) -> None:
    case = Case("linear_qkv", torch.bfloat16, spec=WIDE, loras=JOBS, device="cuda", ops=ops)
    view = case.view(WORKLOADS["skewed"], num_tokens=384, training=True)
    x, dy = inputs(case, 384)
    first, second = case.run(x, dy, view), case.run(x, dy, view)
    for name, value in first.items():
        assert torch.equal(second[name], value), name


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_codes_in_the_place_of_x_give_the_bits_of_gathered_rows(
    ops: LinearOps, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank after the other; the second one's rows begin inside of a tile."""
    if ops.name == "torch":
        pytest.skip("cuBLAS chooses by the number of rows")
    spec = dataclasses.replace(SPEC, hidden_size=512, num_heads=4, num_kv_heads=2, head_dim=128)
    case = Case("linear_qkv", torch.bfloat16, spec=spec, loras=JOBS, device="cuda", ops=ops)
    view = case.view((100, 290, 3, 310), num_tokens=730, training=True)
    base = encode_weight(case.weight)
    if kind == "block":
        blocks = torch.rand(*(size // GROUP for size in base.shape), device="cuda") + 0.5
        base = QuantWeight(base.codes_NK, blocks / 448)
    ranks = Ranks(case, view, case.draw(730, case.site.in_size), base.group)
    ranks.stand_in(monkeypatch)
    expected, _ = ranks.bound().forward(ranks.x_TK, base, case.bias)
    assert torch.isfinite(expected).all()
    for y in ranks.products(base, FoldStrategy(case.bank, case.site, LAYOUT)):
        assert torch.equal(y, expected)
    assert 0 < ranks.bytes < 0.6 * ranks.x_TK.nbytes
