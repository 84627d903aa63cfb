"""Router, order of rows and products of frozen experts, and factors that they share."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.helpers.expert_branch import check_close
from tests.helpers.outer_case import definition, outer_case, results
from tlora_megatron.model.spec import ClampedGlu, ExpertsSpec
from tlora_megatron.ops.experts.branch import (
    ExpertRuns,
    add_biases,
    grouped_products,
    looped_products,
    weights_grad,
)
from tlora_megatron.ops.experts.choice import token_runs
from tlora_megatron.ops.experts.rows import (
    RowSlots,
    route_reference,
    route_vjp,
    sort_rows,
    weighted_glu,
    weighted_glu_back,
)

GLU = ClampedGlu(alpha=1.7, limit=0.9)
QWEN = ExpertsSpec(num_experts=16, top_k=4, ffn_size=8, normalizes=True)
SPECS = {
    "normalised": QWEN,
    "scores": ExpertsSpec(num_experts=16, top_k=4, ffn_size=8, normalizes=False),
    "mixtral": ExpertsSpec(num_experts=16, top_k=4, ffn_size=8, normalizes=True, keeps_fp32=True),
    "gpt_oss": ExpertsSpec(num_experts=16, top_k=4, ffn_size=8, normalizes=True, glu=GLU),
}
BIAS = torch.linspace(-0.5, 0.5, 16)
"""Of gpt-oss' router."""


def transformers_router(spec: ExpertsSpec, weight: Tensor) -> torch.nn.Module:
    sizes = {"hidden_size": weight.shape[1], "num_local_experts": spec.num_experts}
    sizes["num_experts_per_tok"] = spec.top_k
    if spec.glu is not None:
        router = GptOssTopKRouter(GptOssConfig(**sizes))
        router.bias.data = BIAS.to(weight.dtype)
    elif spec.keeps_fp32:
        router = MixtralTopKRouter(MixtralConfig(**sizes))
    else:
        router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**sizes, norm_topk_prob=spec.normalizes))
    router.weight.data = weight
    return router


def bias_of(spec: ExpertsSpec, dtype: torch.dtype) -> Tensor | None:
    return None if spec.glu is None else BIAS.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_choice_and_weights_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    # In bfloat16 some rows have ties between the last choice and the next expert.
    x, weight = torch.randn(4096, 32).to(dtype), torch.randn(16, 32).to(dtype) / 8
    _, expected, chosen = transformers_router(spec, weight)(x)
    routing, _ = route_vjp(x, weight, spec, bias_of(spec, dtype))
    order = chosen.argsort(-1)
    assert torch.equal(routing.experts_TK, chosen.gather(-1, order))
    assert routing.weights_TK.dtype == expected.dtype
    assert torch.equal(routing.weights_TK, expected.gather(-1, order))


@pytest.mark.parametrize("name", SPECS)
def test_the_way_back_is_autograd_s(name: str) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    x, weight = torch.randn(63, 32), torch.randn(16, 32) / 4
    _, back = route_vjp(x, weight, spec, bias_of(spec, x.dtype))
    x.requires_grad_()
    weights = route_reference(x, weight, spec, bias_of(spec, x.dtype)).weights_TK
    grad = torch.randn_like(weights)
    weights.backward(grad)
    torch.testing.assert_close(back(grad), x.grad, rtol=1e-5, atol=1e-6)


def test_gpt_oss_activation_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=8,
        intermediate_size=24,
        num_local_experts=1,
        swiglu_alpha=GLU.alpha,
        swiglu_limit=GLU.limit,
    )
    experts = GptOssExperts(config)
    inner, weights = torch.randn(63, 48, requires_grad=True), torch.rand(63, requires_grad=True)
    taking_turns = torch.stack(inner.chunk(2, dim=-1), dim=-1).flatten(1)
    expected = experts._apply_gate(taking_turns) * weights[:, None]
    grad = torch.randn_like(expected)
    got = weighted_glu(inner.detach(), weights.detach(), GLU)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    dinner, dweights, again = weighted_glu_back(
        grad, inner.detach(), weights.detach(), GLU, with_result=True
    )
    assert again is not None
    assert torch.equal(again, got)
    wanted = torch.autograd.grad(expected, (inner, weights), grad)
    assert (wanted[0] == 0).any(), "the limit must be met"
    torch.testing.assert_close(dinner, wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dweights, wanted[1], rtol=1e-5, atol=1e-5)


def test_biases_of_experts_and_their_way_back() -> None:
    torch.manual_seed(0)
    counts, biases = torch.tensor([[2], [0], [3]]), torch.randn(3, 4)
    y, weights, runs = torch.randn(5, 4), torch.rand(5, requires_grad=True), ExpertRuns(counts)
    of_rows = biases[[0, 0, 2, 2, 2]]
    assert torch.equal(add_biases(y.clone(), biases, runs, None), y + of_rows)
    expected = y + of_rows * weights[:, None]
    assert torch.equal(add_biases(y.clone(), biases, runs, weights.detach()), expected)
    grad = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(expected, weights, grad)
    torch.testing.assert_close(weights_grad(grad, biases, runs), wanted)


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


BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Of bfloat16: rank columns are rounded where they are made, summed and scaled."""


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 63, 257])
def test_outputs_and_gradients_are_the_definition(num_rows: int, dtype: torch.dtype) -> None:
    case = outer_case(num_rows, dtype)
    check_close(results(case), definition(outer_case(num_rows, torch.float64)), BOUNDS[dtype])


def test_rows_of_a_window_keep_their_adapters() -> None:
    ends = (3, 3, 10, 12)  # the second slot has no rows, the last rows no adapter
    for begin, end in itertools.combinations(range(13), 2):
        runs = token_runs(ends, slice(begin, end)).of_adapters
        found = {row: run.slot for run in runs for row in range(run.begin, run.end)}
        slots = [0] * 3 + [2] * 7 + [None] * 2
        expected = {n: slot for n, slot in enumerate(slots[begin:end]) if slot is not None}
        assert found == expected
        assert all(run.expert == 0 for run in runs)
