"""A parallel linear that holds codes: the product, its gradient, moves and casts of its module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from tests.helpers.layout_sites import SPEC
from tests.helpers.one_process import one_process_groups
from tlora_megatron.integrations.megatron.model import transformer_config
from tlora_megatron.layers.quantised_linear import held_codes, quantise_in_place, quantised_linears
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.quantised.weight import encode_weight

IN, OUT, ROWS = 48, 32, 5
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _groups() -> Iterator[None]:
    with one_process_groups():
        yield


@pytest.fixture(params=[ColumnParallelLinear, RowParallelLinear])
def linear(request: pytest.FixtureRequest) -> torch.nn.Module:
    config = transformer_config(SPEC, ParallelLayout(), dtype=torch.float32, recompute="none")
    options = {"input_is_parallel": True} if request.param is RowParallelLinear else {}
    made = request.param(
        IN, OUT, config=config, init_method=None, bias=False, skip_bias_add=False, **options
    ).requires_grad_(False)
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    quantise_in_place(made, "channel", CPU)
    whole = encode_weight(weight)
    made.weight.copy_(whole.codes_NK)
    made.weight_scale.copy_(whole.scales)
    return made


def test_forward_and_gradient_are_those_of_the_codes(linear: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(ROWS, 1, size, generator=generator) for size in (IN, OUT))
    y, bias = linear(x.requires_grad_())
    (dx,) = torch.autograd.grad(y, x, dy)
    assert bias is None
    assert torch.equal(y[:, 0], held_codes(linear).forward(x[:, 0].detach()))
    assert torch.equal(dx[:, 0], held_codes(linear).dgrad(dy[:, 0]))
    with torch.no_grad():
        assert torch.equal(linear(x)[0], y)


def test_casts_and_moves_leave_codes_and_scales(linear: torch.nn.Module) -> None:
    before = {name: value.clone() for name, value in tensors(linear).items()}
    linear.bfloat16().half().to(CPU, torch.float64)
    for name, value in tensors(linear).items():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, before[name]), name
    assert held_codes(linear).scales is linear.weight_scale
    assert held_codes(linear).codes_NK.data_ptr() == linear.weight.data_ptr()


def test_a_state_dict_holds_codes_and_scales(linear: torch.nn.Module) -> None:
    state = {name: value.clone() for name, value in tensors(linear).items()}
    assert {name for name, value in linear.state_dict().items() if value is not None} == {*state}
    for value in tensors(linear).values():
        value.zero_()
    assert not held_codes(linear).codes_NK.any()
    linear.load_state_dict(state)
    assert torch.equal(held_codes(linear).codes_NK, state["weight"])
    assert torch.equal(held_codes(linear).scales, state["weight_scale"])
    assert [name for name, _ in quantised_linears(torch.nn.ModuleList([linear]))] == ["0"]


def tensors(linear: torch.nn.Module) -> dict[str, Tensor]:
    return {"weight": linear.weight, "weight_scale": linear.weight_scale}
