"""The multi-adapter linear against its one-line definition, every output and gradient by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.linear_case import JOBS, TOLERANCE, WORKLOADS, Case, error
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.linear import computes_base, multi_lora_linear
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.lora.torch_ops import TorchLinear
from tlora_megatron.ops.routing import pack_micro_batch


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("linear", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_every_output_and_gradient_equals_the_reference(
    linear: str, workload: str, training: bool, dtype: torch.dtype
) -> None:
    case = Case(linear, dtype)
    lengths = WORKLOADS[workload]
    num_tokens = sum(lengths) + 6
    view = case.view(lengths, num_tokens=num_tokens, training=training)
    x = case.draw(num_tokens, 1, case.site.in_size)
    dy = case.draw(num_tokens, 1, case.site.out_size)
    actual, expected = case.run(x, dy, view), case.reference(x, dy, view)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        got = actual[name].reshape(value.shape)
        assert torch.isfinite(got).all(), name
        assert error(got, value) < TOLERANCE[dtype], name


def test_gradients_of_a_batch_under_way_survive_a_neighbour_leaving() -> None:
    case = Case("linear_fc1", torch.float32)
    view = case.view(WORKLOADS["distinct"], num_tokens=32, training=False)
    x = case.draw(32, 1, case.site.in_size)
    dy = case.draw(32, 1, case.site.out_size)
    alone = case.run(x, dy, view)
    case.run(x, dy, view)
    y = multi_lora_linear(x.requires_grad_(), case.weight, None, case.strategy, view)
    y.backward(dy)
    case.bank.install([a for a in case.bank.adapters if a.name != "job1"])
    after = case.gradients()
    assert after
    for name, grad in after.items():
        assert torch.equal(grad, alone[name]), name


def test_only_the_input_and_the_rank_sized_intermediate_are_saved() -> None:
    case = Case("linear_qkv", torch.float32)
    view = case.view(WORKLOADS["distinct"], num_tokens=40, training=True)
    x = case.draw(40, 1, case.site.in_size).requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        multi_lora_linear(x, case.weight, case.bias, case.strategy, view)
    owned = {t.data_ptr() for t in (x, case.weight)}
    extra = [t for t in saved if t.data_ptr() not in owned]
    # Rows times rank chunks over the targets on this linear: jobs 0 (q, v), 1, 2 (k), 3 (q, k, v).
    assert [t.numel() for t in extra] == [5 * 32 + 9 * 32 + 1 * 16 + 17 * 48]


def test_kernels_get_whole_rows_whatever_the_caller_s_strides() -> None:
    seen: list[torch.Tensor] = []

    class Recording(TorchLinear):
        def forward(self, x_TK: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(x_TK)
            return super().forward(x_TK, *rest)

        def backward_up(self, dy_TN: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(dy_TN)
            return super().backward_up(dy_TN, *rest)

        def backward_down(self, x_TK: torch.Tensor, *rest: Any) -> None:
            seen.append(x_TK)
            super().backward_down(x_TK, *rest)

    case = Case("linear_qkv", torch.float32, ops=SimpleNamespace(name="torch", bind=Recording))
    view = case.view(WORKLOADS["distinct"], num_tokens=40, training=True)
    x = case.draw(case.site.in_size, 1, 40).transpose(0, 2).requires_grad_()
    # A sum's gradient is one element, expanded.
    multi_lora_linear(x, case.weight, case.bias, case.strategy, view).sum().backward()
    assert [tensor.is_contiguous() for tensor in seen] == [True] * 3


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("slot", [1, 2])
def test_a_job_has_the_same_gradient_whoever_is_beside_it(slot: int, dtype: torch.dtype) -> None:
    loras = (LoraSpec(rank=256, alpha=1, target_modules=("q_proj", "linear_qkv")), *JOBS)
    case = Case("linear_qkv", dtype, loras=loras)
    x, dy = case.draw(64, 1, case.site.in_size), case.draw(64, 1, case.site.out_size)
    lengths = (16, 16, 16, 7, 9)
    company = case.run(x, dy, case.view(lengths, num_tokens=64, training=True))
    alone = [n if s == slot else 0 for s, n in enumerate(lengths)]
    first = [t.roll(-16 * slot, 0) for t in (x, dy)]
    loner = case.run(*first, case.view(alone, num_tokens=64, training=True))
    for name, grad in loner.items():
        if name.startswith(f"job{slot}."):
            assert grad.any(), name
            assert torch.equal(grad, company[name]), name


def test_an_adapter_that_joins_brings_no_gradient() -> None:
    case = Case("linear_fc1", torch.float32)
    first, *rest = case.bank.adapters
    case.bank.install(rest)
    for adapter in case.bank.adapters:
        adapter.slab.grad.fill_(1)
    first.slab.grad.fill_(1)
    case.bank.install([*rest, first])
    assert not first.slab.grad.any()
    assert all(adapter.slab.grad.all() for adapter in rest)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_that_no_job_adapts_is_computed_here_where_bits_are_a_jobs_own(bias: bool) -> None:
    """Having factors follows from the neighbours: the host's own GEMM must not run."""
    case = Case("linear_fc1", torch.float64, loras=())
    plain = pack_micro_batch([], num_slots=0, num_tokens=16)
    exact = replace(plain, exactness=Exactness())
    assert not computes_base(case.strategy, plain)
    assert computes_base(case.strategy, exact)
    x = case.draw(16, 1, case.site.in_size).requires_grad_()
    dy = case.draw(16, 1, case.site.out_size)
    bias_N = case.draw(case.site.out_size) if bias else None
    y = multi_lora_linear(x, case.weight, bias_N, case.strategy, exact)
    expected = torch.nn.functional.linear(x, case.weight, bias_N)
    torch.testing.assert_close(y, expected)
    grads = [torch.autograd.grad(out, x, dy)[0] for out in (y, expected)]
    torch.testing.assert_close(*grads)
