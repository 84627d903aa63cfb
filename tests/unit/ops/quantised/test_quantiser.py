"""The quantiser to the bit, and products with quantised weights against formulas in fp64."""

from __future__ import annotations

import bisect
import math

import numpy as np
import pytest
import torch

from tests.helpers.linear_case import JOBS, SPEC, Case, error
from tests.unit.ops.quantised.test_quant_kernels import draw_weight, odd_rows, values_of
from tlora_megatron.layers.linear import multi_lora_linear_vjp
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.parts import frozen_dgrad, frozen_product
from tlora_megatron.ops.quantised.rows import (
    GROUP,
    NAN_CODE,
    QuantRows,
    decode,
    decode_rows,
    encode,
    encode_rows,
    hand_rows,
    handed_rows,
    pass_rows,
)
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight


def _value(code: int) -> float:
    """Decodes sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
    return -size if sign else size


TABLE = [_value(code) for code in range(256)]
_SIZES = TABLE[:0x7F]


def _code(value: float) -> int:
    """The nearest code by search; of two, the one whose last bit is 0."""
    if math.isnan(value):
        return NAN_CODE
    size = abs(value)
    above = min(bisect.bisect_left(_SIZES, size), len(_SIZES) - 1)
    below = max(above - 1, 0)
    up, down = _SIZES[above] - size, size - _SIZES[below]
    nearest = min((abs(down), below & 1, below), (abs(up), above & 1, above))[2]
    return nearest | (0x80 if math.copysign(1, value) < 0 else 0)


def _expected_rows(values: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
    """Codes and scales of fp32 rows, each step rounded to fp32 by NumPy."""
    one, largest = np.float32(1), np.float32(448)
    codes, scales = [], []
    for row in values:
        amax = np.abs(row).max()
        scale = max(amax / largest, np.float32(2.0**-100))
        scale = scale if np.isfinite(amax) else np.float32(np.nan)
        inverse = one / scale
        scaled = np.clip(row * inverse, -largest, largest)
        codes.append([_code(float(x)) for x in scaled])
        scales.append(scale)
    return codes, np.array(scales, dtype=np.float32)


def test_all_codes_decode_to_their_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = decode(codes, dtype).double()
        expected = torch.tensor(TABLE, dtype=torch.float64)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_values_between_codes_are_rounded_to_nearest_even() -> None:
    sizes = torch.tensor(_SIZES, dtype=torch.float64)
    middles = (sizes[1:] + sizes[:-1]) / 2
    beside = [middles.float().nextafter(torch.tensor(end)) for end in (0.0, 1e9)]
    values = torch.cat([sizes.float(), middles.float(), *beside, torch.tensor([1e9, 449.0])])
    values = torch.cat([values, -values, torch.tensor([math.nan, -math.nan])])
    assert encode(values).tolist() == [_code(float(value)) for value in values]


@pytest.mark.parametrize("width", [8, 24, 128, 1000, 28672])
def test_codes_and_scales_of_rows_to_the_bit(width: int) -> None:
    x = odd_rows(width).bfloat16().float()
    rows = encode_rows(x.bfloat16())
    with np.errstate(all="ignore"):
        codes, scales = _expected_rows(x.numpy())
    assert rows.codes_TK.tolist() == codes
    assert rows.scales.numpy().view(np.int32).tolist() == _bits_of(scales, rows)


def _bits_of(scales: np.ndarray, rows: QuantRows) -> list[int]:
    """Bits of scales; any NaN is as good as another."""
    found = rows.scales.numpy()
    assert np.isnan(found).tolist() == np.isnan(scales).tolist()
    return np.where(np.isnan(scales), found, scales).view(np.int32).tolist()


@pytest.mark.parametrize("width", [8, 128, 200, 1000])
def test_a_group_is_quantised_as_a_row_of_its_own(width: int) -> None:
    x = odd_rows(width)
    rows = encode_rows(x, group=GROUP)
    assert rows.codes_TK.is_contiguous()
    assert rows.scales.shape == (len(x), -(-width // GROUP))
    for index, begin in enumerate(range(0, width, GROUP)):
        alone = encode_rows(x[:, begin : begin + GROUP])
        assert torch.equal(rows.codes_TK[:, begin : begin + GROUP], alone.codes_TK)
        torch.testing.assert_close(
            rows.scales[:, index], alone.scales, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("group", [None, GROUP])
def test_factors_of_columns_are_multiplied_in_fp32(group: int | None) -> None:
    x = torch.randn(5, 300).bfloat16()
    fold = torch.rand(300) * 1e-3
    folded, by_hand = encode_rows(x, group=group, fold_K=fold), encode_rows(x.float() * fold)
    if group is None:
        assert torch.equal(folded.codes_TK, by_hand.codes_TK)
        assert torch.equal(folded.scales, by_hand.scales)
    values = decode_rows(folded, torch.float64)
    assert float((values - x.double() * fold).norm() / values.norm()) < 0.04


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
