"""Transformer Engine's linears: whose product our kernels may compute, and FP8 bases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.te_stand_in import Engine, Quantizer
from tlora_megatron.layers import transformer_engine as te
from tlora_megatron.layers.multi_adapter import make_multi_adapter


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


CODES = {"weight": Quantised(torch.zeros(4, 4))}
FP8 = {"primary_weights_in_fp8": True, "config": SimpleNamespace(fp8="hybrid")}


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
        (TERowParallelLinear(), CODES, "weights are held as Quantised"),
        (TERowParallelLinear(), CODES | FP8, None),
    ],
)
def test_what_keeps_the_product(linear: Any, changes: dict[str, Any], reason: str | None) -> None:
    for name, value in changes.items():
        setattr(linear, name, value)
    for _ in range(2):  # with adapters too
        found = te.why_not_te_product(linear)
        assert (found is None) == (reason is None), found
        assert (reason or "") in (found or "")
        make_multi_adapter(linear, te.TEProductMixin)


class Linear(nn.Module):
    """The attributes of Transformer Engine's linears that are read, as in 2.17.1."""

    activation_dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.config = SimpleNamespace(fp8="hybrid")
        self.is_first_microbatch = True
        self._fp8_workspaces: dict[str, Any] = {}
        self.open = 0

    def prepare_forward(self, x: Tensor) -> Tensor:
        self.open += 1
        return x

    def end_forward(self) -> None:
        self.open -= 1

    def _get_quantizers(self, *_: bool) -> list[Any]:
        return [Quantizer() for _ in range(6)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(te, "_engine", lambda: engine)
    return engine


def test_products_and_a_weight_that_is_quantised_once(engine: Engine) -> None:
    linear, x, dy = Linear(), torch.randn(5, 4), torch.randn(5, 3)
    for _ in range(3):
        linear.is_first_microbatch = True  # Megatron sets it at every step
        base, onto = te.Fp8Base(linear), torch.ones(5, 3)
        y = base.forward(x, onto)
        assert y is onto
        torch.testing.assert_close(y, 1 + x @ linear.weight.t())
        torch.testing.assert_close(base.dgrad(dy, None), dy @ linear.weight)
    assert linear.open == 0
    assert engine.weights_quantised == 1
    assert engine.steps_ended == 0


def test_other_weights_are_quantised_anew(engine: Engine) -> None:
    linear, x = Linear(), torch.randn(5, 4)
    te.Fp8Base(linear).forward(x, None)
    with torch.no_grad():
        linear.weight.mul_(2)
    y = te.Fp8Base(linear).forward(x, None)
    torch.testing.assert_close(y, x @ linear.weight.t())
    assert engine.weights_quantised == 2


def test_delayed_scales_move_once_a_step(engine: Engine) -> None:
    engine.recipe = SimpleNamespace(delayed=lambda: True)
    linears, x, dy = (Linear(), Linear()), torch.randn(5, 4), torch.randn(5, 3)
    bases = [te.Fp8Base(linear) for linear in linears]
    for base in bases:
        base.forward(x, None)
    for base in reversed(bases):
        assert engine.steps_ended == 0
        base.dgrad(dy, None)
    assert engine.steps_ended == 1, "behind the first linear's backward, the last of all"
    for linear in linears:
        linear.is_first_microbatch = True
        te.Fp8Base(linear).forward(x, None)
    assert engine.weights_quantised == 4


def test_the_base_is_the_weight_outside_of_fp8(engine: Engine) -> None:
    linear = Linear()
    assert isinstance(te.te_base(linear), te.Fp8Base)
    engine.on = False
    assert te.te_base(linear) is linear.weight
    linear.config.fp8 = None
    engine.on = True
    assert te.te_base(linear) is linear.weight


def test_a_repeated_forward_is_in_fp8_too(engine: Engine) -> None:
    surroundings = te.replay_autocast()
    engine.on = False
    with surroundings():
        assert isinstance(te.te_base(Linear()), te.Fp8Base)
    assert not engine.on


def test_recipes_and_libraries_that_stay_with_the_modules() -> None:
    assert "fp8_recipe is mxfp8" in (te.why_not_fp8("mxfp8") or "")
    if not torch.cuda.is_available():
        assert "another than its FP8 was written for" in (te.why_not_fp8("blockwise") or "")
