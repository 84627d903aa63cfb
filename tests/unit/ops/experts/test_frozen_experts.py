"""Router, order of rows and products of frozen experts, against transformers and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tlora_megatron.model.experts import ExpertsSpec
from tlora_megatron.ops.experts.branch import ExpertRuns
from tlora_megatron.ops.experts.products import grouped_products, looped_products
from tlora_megatron.ops.experts.router import route_reference, route_vjp
from tlora_megatron.ops.experts.rows import RowSlots, sort_rows

QWEN = ExpertsSpec(num_experts=16, top_k=4, ffn_size=8, normalizes=True)
SPECS = {
    "normalised": QWEN,
    "scores": ExpertsSpec(num_experts=16, top_k=4, ffn_size=8, normalizes=False),
    "mixtral": ExpertsSpec(num_experts=16, top_k=4, ffn_size=8, normalizes=True, keeps_fp32=True),
}


def transformers_router(spec: ExpertsSpec, weight: Tensor) -> torch.nn.Module:
    sizes = {"hidden_size": weight.shape[1], "num_local_experts": spec.num_experts}
    sizes["num_experts_per_tok"] = spec.top_k
    if spec.keeps_fp32:
        router = MixtralTopKRouter(MixtralConfig(**sizes))
    else:
        router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**sizes, norm_topk_prob=spec.normalizes))
    router.weight.data = weight
    return router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_choice_and_weights_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    # In bfloat16 some rows have ties between the last choice and the next expert.
    x, weight = torch.randn(4096, 32).to(dtype), torch.randn(16, 32).to(dtype) / 8
    _, expected, chosen = transformers_router(spec, weight)(x)
    routing, _ = route_vjp(x, weight, spec)
    order = chosen.argsort(-1)
    assert torch.equal(routing.experts_TK, chosen.gather(-1, order))
    assert routing.weights_TK.dtype == expected.dtype
    assert torch.equal(routing.weights_TK, expected.gather(-1, order))


@pytest.mark.parametrize("name", SPECS)
def test_the_way_back_is_autograd_s(name: str) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    x, weight = torch.randn(63, 32), torch.randn(16, 32) / 4
    _, back = route_vjp(x, weight, spec)
    x.requires_grad_()
    weights = route_reference(x, weight, spec).weights_TK
    grad = torch.randn_like(weights)
    weights.backward(grad)
    torch.testing.assert_close(back(grad), x.grad, rtol=1e-5, atol=1e-6)


def test_rows_lie_expert_by_expert_and_come_back() -> None:
    experts_TK = torch.tensor([[0, 3], [1, 3], [0, 1]])
    rows = sort_rows(experts_TK, 5)
    assert rows.counts_ES.tolist() == [[2], [2], [0], [2], [0]]
    assert rows.rows_R.tolist() == [0, 2, 1, 2, 0, 1]
    x = torch.randn(3, 4)
    torch.testing.assert_close(rows.sum(rows.spread(x)), 2 * x)
    weights = torch.arange(6.0).view(3, 2)
    assert rows.pick(weights).tolist() == [0, 4, 2, 5, 1, 3]
    assert torch.equal(rows.pick(weights)[rows.places_TK], weights)


def test_rows_are_counted_by_adapter() -> None:
    experts_TK = torch.tensor([[0, 3], [1, 3], [0, 1], [0, 3]])
    slots = RowSlots(torch.tensor([0, 0, 1, 2]), num_slots=2)  # the last row has no adapter
    rows = sort_rows(experts_TK, 5, slots)
    assert rows.counts_ES.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0], [2, 0, 1], [0, 0, 0]]
    runs = ExpertRuns(rows.counts_ES)
    assert runs.counts_L.tolist() == [3, 2, 0, 3, 0]
    assert [tuple(run) for run in runs.of_adapters] == [
        (0, 0, 0, 1), (0, 1, 1, 2), (1, 0, 3, 4), (1, 1, 4, 5), (3, 0, 5, 7)
    ]  # fmt: skip


def test_a_row_that_is_nan_stays_alone() -> None:
    torch.manual_seed(0)
    x, weight, linear = torch.randn(7, 8), torch.randn(16, 8), torch.randn(16, 8, 8)
    x[3] = torch.nan
    routing, back = route_vjp(x, weight, QWEN)
    rows = sort_rows(routing.experts_TK, 16)
    y = rows.sum(looped_products(rows.spread(x), linear, rows.counts_ES[:, 0]))
    for values in (y, back(routing.weights_TK)):
        assert values.isfinite().all(-1).tolist() == [True] * 3 + [False] + [True] * 3


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_the_loop_s(counts: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 16).to(dtype), torch.randn(4, 24, 16).to(dtype)
    counts_E = torch.tensor(counts)
    for given, weights in ((x, weight.transpose(1, 2)), (torch.randn(9, 24).to(dtype), weight)):
        expected = looped_products(given, weights, counts_E)
        torch.testing.assert_close(grouped_products(given, weights, counts_E), expected)
