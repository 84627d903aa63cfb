"""The quantiser to the bit, against a table of e4m3fn made from its definition, in Python."""

from __future__ import annotations

import bisect
import math

import numpy as np
import pytest
import torch

from tests.unit.ops.quantised.test_quant_kernels import odd_rows
from tlora_megatron.ops.quantised.rows import (
    GROUP,
    NAN_CODE,
    QuantRows,
    decode,
    decode_rows,
    encode,
    encode_rows,
)


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
