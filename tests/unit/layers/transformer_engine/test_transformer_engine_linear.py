"""Which linears of Transformer Engine may give their product to our kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.multi_adapter import check_blocks_fit, make_multi_adapter
from tlora_megatron.layers.transformer_engine import (
    TEProductMixin,
    is_te_linear,
    why_not_te_product,
)


class _Wrapper(nn.Module):
    """The attributes of Megatron's wrappers that are read, as with Transformer Engine 2.17.1."""

    def __init__(self, parallel_mode: str = "row", bias: bool = False) -> None:
        super().__init__()
        self.parallel_mode = parallel_mode
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.bias: Any = nn.Parameter(torch.zeros(4)) if bias else torch.Tensor()
        self.te_return_bias = False
        self.te_quant_params = None
        self.primary_weights_in_fp8 = False
        self.config = SimpleNamespace(fp8=None)


class TERowParallelLinear(_Wrapper):
    pass


class TEColumnParallelLinear(_Wrapper):
    pass


class TELMHeadColumnParallelLinear(TEColumnParallelLinear):
    pass


class Quantised(nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("linear", "changes", "reason"),
    [
        (TERowParallelLinear(), {}, None),
        (TEColumnParallelLinear("column", bias=True), {}, None),
        (TELMHeadColumnParallelLinear("column"), {}, "a linear of another kind"),
        (TEColumnParallelLinear("row"), {}, "a TEColumnParallelLinear has parallel_mode row"),
        (TERowParallelLinear(bias=True), {}, "a row-parallel linear has a bias"),
        (TERowParallelLinear(), {"te_return_bias": True}, "a bias is left to the caller"),
        (TERowParallelLinear(), {"te_quant_params": 1}, "quantisation settings of its own"),
        (
            TERowParallelLinear(),
            {
                "weight": Quantised(torch.zeros(4, 4)),
                "primary_weights_in_fp8": True,
                "config": SimpleNamespace(fp8="hybrid"),
            },
            None,
        ),
        (
            TERowParallelLinear(),
            {"weight": Quantised(torch.zeros(4, 4))},
            "weights are held as Quantised",
        ),
    ],
)
def test_what_keeps_the_product(linear: Any, changes: dict[str, Any], reason: str | None) -> None:
    for name, value in changes.items():
        setattr(linear, name, value)
    for _ in range(2):  # with adapters too
        found = why_not_te_product(linear)
        assert (found is None) == (reason is None), found
        assert (reason or "") in (found or "")
        make_multi_adapter(linear, TEProductMixin)


def test_linears_by_their_wrapper() -> None:
    assert is_te_linear(TERowParallelLinear())
    assert not is_te_linear(TELMHeadColumnParallelLinear())
    assert not is_te_linear(nn.Linear(2, 2))


def test_blocks_around_them_are_refused_by_the_name_of_the_job() -> None:
    linear: Any = make_multi_adapter(TERowParallelLinear(), TEProductMixin)
    shard = SimpleNamespace(target="o_proj")
    site: Any = SimpleNamespace(targets=(shard,), tp_size=2)
    lora = LoraSpec(rank=4, parametrization="block_diagonal", num_blocks=2)
    with pytest.raises(ValueError, match=r"lora\.parametrization of job 'a' must be standard"):
        check_blocks_fit("a", lora, [(site, linear)])
