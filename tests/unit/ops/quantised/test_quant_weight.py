"""Products with quantised weights against formulas written out in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.linear_case import JOBS, SPEC, Case, error
from tests.unit.ops.quantised.test_quant_kernels import draw_weight, values_of
from tlora_megatron.layers.linear import multi_lora_linear_vjp
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.parts import frozen_dgrad, frozen_product
from tlora_megatron.ops.quantised.rows import (
    GROUP,
    decode_rows,
    encode_rows,
    hand_rows,
    handed_rows,
    pass_rows,
)
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 3e-7)])
@pytest.mark.parametrize("shape", [(128, 256), (200, 72), (8, 16), (130, 392)])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_products_equal_the_formulas(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, limit: float
) -> None:
    weight = draw_weight(kind, *shape)
    x, dy = torch.randn(7, shape[1], dtype=dtype), torch.randn(7, shape[0], dtype=dtype)
    whole = values_of(weight, torch.float64)
    x_read = decode_rows(encode_rows(x, group=weight.group), torch.float64)
    assert _error(weight.forward(x), x_read @ whole.t()) < limit
    if kind == "channel":
        codes = whole / weight.scales.double()[:, None]
        dx = decode_rows(encode_rows(dy.float() * weight.scales), torch.float64) @ codes
    else:
        dx = decode_rows(encode_rows(dy), torch.float64) @ whole
    assert _error(weight.dgrad(dy), dx) < limit


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_products_are_close_to_those_of_the_values(kind: str) -> None:
    weight = draw_weight(kind, 264, 392)
    x, dy = torch.randn(9, 392).bfloat16(), torch.randn(9, 264).bfloat16()
    whole = values_of(weight, torch.float64)
    assert weight.forward(x).dtype == weight.dgrad(dy).dtype == torch.bfloat16
    assert _error(weight.forward(x), x.double() @ whole.t()) < 0.04
    assert _error(weight.dgrad(dy), dy.double() @ whole) < 0.04


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_gradients_of_any_size_are_as_exact(kind: str) -> None:
    """Losses are means over a batch's tokens, so gradients are far below activations."""
    weight, smaller = draw_weight(kind, 264, 392), 2.0**-60
    dy = torch.randn(9, 264)
    assert torch.equal(weight.dgrad(dy * smaller), weight.dgrad(dy) * smaller)


def test_products_are_added_in_place_and_rounded_once() -> None:
    weight = draw_weight("channel", 24, 40)
    x, dy = torch.randn(3, 40).bfloat16(), torch.randn(3, 24).bfloat16()
    for product, rows in ((weight.forward, x), (weight.dgrad, dy)):
        wide = product(rows.float())
        onto = torch.randn(wide.shape).bfloat16()
        expected = (onto.float() + wide).bfloat16()
        assert product(rows, onto) is onto
        assert torch.equal(onto, expected)


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_a_row_depends_on_itself_alone_and_keeps_its_nan(kind: str) -> None:
    weight = draw_weight(kind, 200, 300)
    x, dy = torch.randn(33, 300), torch.randn(33, 200)
    expected = weight.forward(x), weight.dgrad(dy)
    for rows, product, whole in zip((x, dy), (weight.forward, weight.dgrad), expected, strict=True):
        assert torch.equal(product(rows[4:5]), whole[4:5])
        rows[0, 5], rows[1, 7], rows[2] = math.nan, -math.inf, rows[2] * 1e30
        beside = product(rows)
        assert beside[:2].isnan().all()
        assert torch.equal(beside[3:], whole[3:])


def test_scales_must_fit_the_codes() -> None:
    codes = torch.zeros(200, 300, dtype=torch.uint8)
    with pytest.raises(AssertionError, match=r"scales must be \[200\] or \[2, 3\], got \[3, 2\]"):
        QuantWeight(codes, torch.ones(3, 2))


def test_exactness_takes_a_quantised_base_as_it_is() -> None:
    weight, bias = draw_weight("channel", 24, 40), torch.randn(24)
    x, dy = torch.randn(3, 40), torch.randn(3, 24)
    assert torch.equal(frozen_product(x, weight, bias, Exactness()), weight.forward(x) + bias)
    assert torch.equal(frozen_dgrad(dy, weight, Exactness()), weight.dgrad(dy))


@pytest.mark.parametrize("linear", ["linear_qkv", "linear_fc2"])
def test_adapters_on_a_quantised_base(linear: str) -> None:
    case = Case(linear, torch.float64, spec=SPEC, loras=JOBS)
    plain, weight = case.weight, encode_weight(case.weight)
    view = case.view((5, 9, 1, 17), num_tokens=40, training=True)
    x, dy = case.draw(40, plain.shape[1]), case.draw(40, plain.shape[0])

    def run(base: torch.Tensor | QuantWeight) -> dict[str, torch.Tensor]:
        y, vjp = multi_lora_linear_vjp(x, base, case.bias, case.strategy, view)
        return {"y": y, "dx": vjp(dy), **case.gradients()}

    found, reference = run(weight), run(plain)
    reference["y"] += weight.forward(x) - x @ plain.t()
    reference["dx"] += weight.dgrad(dy) - dy @ plain
    for name, expected in reference.items():
        # The branch, and all gradients of factors, are those of unquantised rows.
        assert error(found[name], expected) < 1e-12, name


def test_handed_codes_are_taken_once_and_only_while_they_are_right() -> None:
    x, fold = torch.randn(3, 40), torch.rand(40)
    rows, folded = encode_rows(x), encode_rows(x, fold_K=fold)
    assert handed_rows(x, None) is None
    hand_rows(x, rows)
    assert handed_rows(x, None) is rows
    assert handed_rows(x, None) is None
    hand_rows(x, folded, fold)
    assert handed_rows(x, None, fold.clone()) is None
    hand_rows(x, folded, fold)
    assert handed_rows(x, None, fold) is folded
    hand_rows(x, rows)
    assert handed_rows(x, GROUP) is None
    hand_rows(x, rows)
    x.add_(1)
    assert handed_rows(x, None) is None


def test_codes_pass_to_a_view_of_all_rows() -> None:
    x = torch.randn(3, 40)
    rows = encode_rows(x)
    hand_rows(x, rows)
    view = pass_rows(x, x.unsqueeze(1))
    assert handed_rows(x, None) is None
    again = pass_rows(view, view.flatten(0, 1))
    assert handed_rows(again, None) is rows
    hand_rows(x, rows)
    view = pass_rows(x, x.unsqueeze(1))
    x.add_(1)
    assert handed_rows(view, None) is None, "what a view shares has changed"


def test_a_weight_takes_handed_codes() -> None:
    weight = draw_weight("channel", 24, 40)
    x, dy = torch.randn(3, 40), torch.randn(3, 24)
    other_x, other_dy = torch.randn(3, 40), torch.randn(3, 24)
    hand_rows(x, encode_rows(other_x))
    hand_rows(dy, encode_rows(other_dy, fold_K=weight.scales), weight.scales)
    assert torch.equal(weight.forward(x), weight.forward(other_x))
    assert torch.equal(weight.dgrad(dy), weight.dgrad(other_dy))
