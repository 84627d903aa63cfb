"""A layer's sublayers on a GPU: streams, addresses and memory that is handed out again."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from tests.helpers.linear_case import TOLERANCE, error
from tests.unit.integrations.megatron.layer.test_frozen_sublayer import (
    SPEC,
    Case,
    use_modules,
    whole,
)
from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.ops.lora.kernel_choice import forced_kernels
from tlora_megatron.ops.routing import MicroBatchView, use_micro_batch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ops")]

WIDE = replace(SPEC, hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=768)
DTYPE = torch.bfloat16


def in_flight(case: Case, view: MicroBatchView) -> list[torch.Tensor]:
    """Outputs and gradients of two micro-batches, both forward before either goes back."""
    for grad in case.slabs:
        grad.zero_()
    inputs = [(case.hidden * scale).requires_grad_() for scale in (1.0, 0.5)]
    outs = []
    for hidden in inputs:
        with use_micro_batch(view):
            outs.append(case.decoder(hidden_states=hidden, attention_mask=None))
        # What is read after it was given back shows as NaN; blocks as small as these tensors are.
        poison = [torch.full((1 << 13,), torch.nan, dtype=DTYPE, device=hidden.device)]
        poison += [poison[0].clone() for _ in range(512)]
        del poison
    for out in outs:
        out.backward(case.dout)
    found = [*outs, *(hidden.grad for hidden in inputs), *case.slabs]
    return [x.detach().clone() for x in found if x is not None]


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_batches_in_flight_give_what_modules_give(
    recompute: Recompute, num_parts: int, is_fp8: bool
) -> None:
    case = Case(recompute, spec=WIDE, dtype=DTYPE, is_fp8=is_fp8)
    check(case, case.view(num_parts))


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_micro_batch_chooses_what_is_computed_again(
    recompute: Recompute, num_parts: int, is_fp8: bool
) -> None:
    case = Case(spec=WIDE, dtype=DTYPE, is_fp8=is_fp8)
    view = case.view(num_parts)
    check(case, view.under(recompute))


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("sharding", get_args(LoraSharding)[1:])
def test_ranks_are_shared_as_modules_do(sharding: LoraSharding, recompute: Recompute) -> None:
    check(Case(recompute, spec=WIDE, dtype=DTYPE, sharding=sharding), whole())


@pytest.mark.parametrize("num_parts", [1, 2])
def test_heads_are_normed_as_modules_do(num_parts: int) -> None:
    spec = replace(WIDE, model_type="qwen3", qkv_bias=False, qk_norm=True)
    case = Case(spec=spec, dtype=DTYPE)
    check(case, case.view(num_parts))


def test_rows_are_quantised_by_who_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for attention's output, and the gradient of the last layer's output."""
    if forced_kernels() == "torch":
        pytest.skip("quantises in torch")
    from tlora_megatron.ops.quantised import triton_rows

    case = Case(spec=WIDE, dtype=DTYPE, is_fp8=True)
    in_flight(case, whole())
    counted, launch = [], triton_rows._encode.launch
    monkeypatch.setattr(
        triton_rows._encode, "launch", lambda *a, **k: (counted.append(1), launch(*a, **k))
    )
    in_flight(case, whole())
    assert len(counted) == 2 * (WIDE.num_layers + 1)


def check(case: Case, view: MicroBatchView) -> None:
    assert all(layer.direct_sublayers for layer in case.decoder.layers)
    actual = [in_flight(case, view) for _ in range(3)][-1]  # the last by warm launches
    use_modules(case.decoder)
    for i, (found, expected) in enumerate(zip(actual, in_flight(case, view), strict=True)):
        assert torch.isfinite(found).all(), i
        assert error(found, expected) < TOLERANCE[DTYPE], i
