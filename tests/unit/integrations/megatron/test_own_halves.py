"""Layers of which our kernels compute one half, and what keeps parts with their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.built_model import PACKINGS
from tests.unit.integrations.megatron.test_own_compute import (
    NUM_LAYERS,
    Case,
    Results,
    assert_same,
    num_run,
)
from tlora_megatron.parallel.groups import ParallelGroups

__all__ = ["num_run"]  # a fixture

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU"),
    pytest.mark.slow,
]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rope": "yarn"}, ""),
        ({"rope": "yarn", "te": True}, ""),
        ({"rope": "partial"}, ""),
        ({"rope": "interleaved"},
         "MLP by our kernels, attention by Megatron's modules: rotary_int"),
        ({"rope": "interleaved", "te": True, "recompute_granularity": "full"}
         | {"recompute_method": "uniform", "recompute_num_layers": 1},
         "MLP by our kernels, attention by Megatron's modules: rotary_interleaved is True: our"),
        ({"activation_func": F.gelu, "te": True},
         "attention by our kernels, MLP by Megatron's modules: activation_func is gelu: our "),
        ({"activation_func": F.gelu, "recompute_granularity": "selective"}
         | {"recompute_modules": ["mlp"]},
         "attention by our kernels, MLP by Megatron's modules: activation_func is gelu: our "),
    ],
    ids=["yarn", "yarn TE", "partial", "interleaved", "interleaved TE full", "GELU TE", "GELU mlp"],
)  # fmt: skip
def test_settings_about_one_half_keep_that_half_alone(
    options: dict[str, Any], told: str, groups: ParallelGroups, num_run: list[int]
) -> None:
    expected = Case(groups, own=False, **options).results()
    assert not num_run
    case = Case(groups, **options)
    assert_same(case.results(), expected)
    times = 2 if options.get("recompute_granularity") == "full" else 1
    assert len(num_run) == times * NUM_LAYERS * len(PACKINGS)
    halves = NUM_LAYERS if told else 0
    assert case.compute.layers == (NUM_LAYERS - halves, halves, 0)
    assert (f"4 in one half, head by ours; layers 0-3: {told}" in case.compute.line) == bool(told)
    assert not case.compute.late.found


def _other(module: Any, name: str) -> None:
    """Makes a module one of another class, which does the same."""
    module.__class__ = type(name, (type(module),), {"__module__": __name__})


class _Cross(nn.Module):
    def forward(self, x: Any, **_: Any) -> Any:
        return x


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, value)


ATTENTION = {
    "its norm is no RMSNorm of torch": lambda layer: _other(layer.input_layernorm, "Norm"),
    "a Attention is no SelfAttention": lambda layer: _other(layer.self_attention, "Attention"),
    "a Linear computes by itself": lambda layer: _other(layer.self_attention.linear_proj, "Linear"),
    "self_attn_bda is not Megatron's own": lambda layer: setattr(
        layer, "self_attn_bda", lambda *args, bda=layer.self_attn_bda: bda(*args)
    ),
    "it has cross_attention": _set("cross_attention", _Cross()),
}
MLP = {
    "its norm is no RMSNorm of torch": lambda layer: _other(layer.pre_mlp_layernorm, "Norm"),
    "a OtherMLP is no MLP": lambda layer: _other(layer.mlp, "OtherMLP"),
    "a Linear computes by itself": lambda layer: _other(layer.mlp.linear_fc1, "Linear"),
    "mlp_bda is not Megatron's own": lambda layer: setattr(
        layer, "mlp_bda", lambda *args, bda=layer.mlp_bda: bda(*args)
    ),
}
WHOLE = {"a Layer is no TransformerLayer": lambda layer: _other(layer, "Layer")}
CHANGES = [
    *((reason, change, "MLP by our kernels, attention ") for reason, change in ATTENTION.items()),
    *((reason, change, "attention by our kernels, MLP ") for reason, change in MLP.items()),
    *((reason, change, "") for reason, change in WHOLE.items()),
]


@pytest.fixture(scope="module")
def by_modules(groups: ParallelGroups) -> Results:
    return Case(groups, own=False).results()


@pytest.mark.parametrize(("reason", "change", "half"), CHANGES)
def test_what_is_built_otherwise_runs_by_its_modules(
    reason: str,
    change: Callable[[Any], None],
    half: str,
    by_modules: Results,
    groups: ParallelGroups,
    num_run: list[int],
) -> None:
    case = Case(groups, change=lambda model: change(model.decoder.layers[2]))
    where = f"; layers 2: {half}" if half else "; layers 2 "
    assert f"{where}by Megatron's modules: {reason}" in case.compute.line
    assert_same(case.results(), by_modules)
    assert len(num_run) == (NUM_LAYERS if half else NUM_LAYERS - 1) * len(PACKINGS)


@pytest.mark.parametrize(
    ("field", "value"), [("tp_comm_overlap", True), ("fp4", "e2m1"), ("use_kitchen", True)]
)
def test_settings_about_linears_keep_the_layers_and_not_the_head(
    field: str, value: Any, by_modules: Results, groups: ParallelGroups, num_run: list[int]
) -> None:
    case = Case(groups, change=lambda model: setattr(model.config, field, value))
    assert case.compute.layers == (0, 0, NUM_LAYERS)
    assert f"head by ours; layers 0-3 by Megatron's modules: {field} is" in case.compute.line
    assert_same(case.results(), by_modules)
    assert not num_run
