"""Triton's quantiser, products of codes and casts by one scale a tensor, against their definition.

On a GPU they run as they are, elsewhere in the process of `test_interpreted_kernels`. What the
compiler makes of the products is read on any machine. That the bits of casts are Transformer
Engine's is shown in `tests/gpu/test_transformer_engine_gpu.py`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import COMPILES, DEVICE, INTERPRETED, RUNS, compiled_for
from tests.unit.ops.frozen.test_frozen_kernels import draw
from tlora_megatron.ops.frozen import parts, rms_norm
from tlora_megatron.ops.frozen.parts import NormWeight
from tlora_megatron.ops.quantised.rows import (
    GROUP,
    ONE_SCALE,
    QuantRows,
    decode_rows,
    encode,
    encode_rows,
    find_largest,
    take_largest,
)
from tlora_megatron.ops.quantised.weight import (
    QuantWeight,
    encode_weight,
    forward_product,
    input_gradient,
)


def odd_rows(width: int, num_rows: int = 13) -> Tensor:
    """Rows of values that a quantiser may get wrong; the last ones are plain."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(num_rows, width, generator=generator)
    x[1], x[9] = 0, -0.0
    x[2] *= 1e-30
    x[3] *= 1e30
    x[4, width // 2], x[5, 0], x[6, -1], x[8, 1] = math.nan, math.inf, -math.inf, -math.nan
    x[7] *= 1e-39  # subnormal
    x[10, 1:] *= 2**-17  # beside one large value, at the codes' own subnormals
    x[11] *= 3e38 / x[11].abs().max()
    return x


def encoded(x: Tensor, group: int | None = None, fold: Tensor | None = None) -> QuantRows:
    """The kernel's codes, on the CPU."""
    from tlora_megatron.ops.quantised.triton_rows import launch_encode

    fold = None if fold is None else fold.to(DEVICE)
    return QuantRows(*(t.cpu() for t in launch_encode(x.to(DEVICE), group, fold)))


def assert_same_rows(actual: QuantRows, expected: QuantRows) -> None:
    """The same bits; any NaN is as good a scale as another."""
    assert torch.equal(actual.codes_TK, expected.codes_TK)
    torch.testing.assert_close(actual.scales, expected.scales, rtol=0, atol=0, equal_nan=True)


@RUNS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("width", [8, 63, 128, 200, 9000])
def test_rows_to_the_bit(width: int, group: int | None, folds: bool, dtype: torch.dtype) -> None:
    x = odd_rows(width).to(dtype)
    fold = torch.rand(width) + 1e-3 if folds else None
    assert_same_rows(encoded(x, group, fold), encode_rows(x, group=group, fold_K=fold))


@RUNS
def test_values_between_codes_are_rounded_to_nearest_even() -> None:
    sizes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = ((sizes[1:] + sizes[:-1]) / 2).float()
    beside = [middles.nextafter(torch.tensor(end)) for end in (0.0, 1e9)]
    values = torch.cat([middles, *beside, sizes.float()])  # the last makes the scale 1
    rows = encoded(torch.stack([values, -values]))
    assert rows.scales.tolist() == [1, 1]
    assert torch.equal(rows.codes_TK, encode(torch.stack([values, -values])))


@RUNS
def test_no_rows() -> None:
    rows = encoded(torch.empty(0, 24))
    assert rows.codes_TK.shape == (0, 24)
    assert rows.scales.shape == (0,)


def draw_weight(kind: str, num_rows: int, num_columns: int) -> QuantWeight:
    """Codes of normal values, and scales that differ."""
    generator = torch.Generator().manual_seed(num_rows)
    w_NK = torch.randn(num_rows, num_columns, generator=generator)
    w_NK *= torch.rand(num_rows, 1, generator=generator) + 0.5
    channels = encode_weight(w_NK)
    if kind == "channel":
        return channels
    scales = torch.rand(-(-num_rows // GROUP), -(-num_columns // GROUP), generator=generator)
    return QuantWeight(channels.codes_NK, (scales + 0.5) * 1e-2)


def values_of(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    """Returns `[N, K]`, multiplied in `dtype`."""
    codes, scales = weight.codes_NK, weight.scales
    if scales.dim() == 2:
        scales = scales.repeat_interleave(GROUP, 0)[: len(codes)]
    return decode_rows(QuantRows(codes, scales), dtype)


def products(weight: QuantWeight, x: Tensor, dy: Tensor, ontos: tuple[Any, Any]) -> list[Tensor]:
    """y and dx of the kernels, on the CPU."""
    from tlora_megatron.ops.quantised.triton_products import launch_forward, launch_input_gradient

    def there(rows: QuantRows) -> QuantRows:
        return QuantRows(rows.codes_TK.to(DEVICE), rows.scales.to(DEVICE))

    codes, scales = weight.codes_NK.to(DEVICE), weight.scales.to(DEVICE)
    onto, onto_back = (None if onto is None else onto.to(DEVICE) for onto in ontos)
    y = launch_forward(there(weight.rows_of(x)), codes, scales, x.dtype, onto)
    rows = there(weight.gradient_rows_of(dy))
    dx = launch_input_gradient(rows, codes, scales, dy.dtype, onto_back)
    assert onto is None or (y is onto and dx is onto_back)
    return [y.cpu(), dx.cpu()]


def row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a row over the row's norm."""
    difference = actual.double() - expected.double()
    return float((difference.norm(dim=1) / expected.double().norm(dim=1)).max())


@RUNS
@pytest.mark.parametrize("shape", [(1, 8, 16), (130, 144, 272), (5, 300, 128)])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_products(kind: str, shape: tuple[int, int, int]) -> None:
    num_rows, num_columns, depth = shape
    weight = draw_weight(kind, num_columns, depth)
    x, dy = torch.randn(num_rows, depth), torch.randn(num_rows, num_columns)
    rows, back = weight.rows_of(x), weight.gradient_rows_of(dy)
    y = forward_product(rows, weight.codes_NK, weight.scales, x.dtype)
    dx = input_gradient(back, weight.codes_NK, weight.scales, x.dtype)
    ontos = torch.randn(y.shape), torch.randn(dx.shape)
    plain = products(weight, x, dy, (None, None))
    added = products(weight, x, dy, (ontos[0].clone(), ontos[1].clone()))
    limit = 1e-6 if INTERPRETED else 2e-3
    for actual, onto, sums, expected in zip(plain, ontos, added, (y, dx), strict=True):
        assert row_error(actual, expected) < limit
        assert row_error(sums, expected + onto) < limit


@RUNS
def test_a_row_of_a_product_depends_on_itself_alone_and_keeps_its_nan() -> None:
    weight = draw_weight("block", 200, 300)
    x, dy = torch.randn(133, 300), torch.randn(133, 200)
    whole = products(weight, x, dy, (None, None))
    x[0, 5], dy[0, 7], x[1], dy[2] = math.nan, math.inf, x[1] * 1e30, dy[2] * 1e30
    beside = products(weight, x, dy, (None, None))
    alone = products(weight, x[77:78], dy[77:78], (None, None))
    for expected, found, single in zip(whole, beside, alone, strict=True):
        assert torch.equal(found[3:], expected[3:])
        assert torch.equal(single, expected[77:78])
        assert found[0].isnan().all()
        assert not found[1:].isnan().any()


INSTRUCTIONS = {80: "f32.f16.f16.f32", 89: "e4m3.e4m3", 90: "wgmma", 100: "tcgen05"}
"""Compute capability x 10 -> what its tensor cores are given."""


@COMPILES
@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_each_128_of_the_contraction_are_a_product_of_their_own(capability: int) -> None:
    """Triton must not hand the sum so far to tensor cores."""
    from tlora_megatron.ops.quantised.triton_products import _product_kernel

    constants = {
        "NUM_COLUMNS": 6144, "DEPTH": 4096, "ROW_GROUPS": False, "SCALES": 1, "COLUMN_STRIDE": 0,
        "DEPTH_STRIDE": 0, "ADDS": True, "BY_HAND": capability < 89, "BM": 128, "BAND": 8,
        "STAGES": 3,
    }  # fmt: skip
    types = {"codes": "*u8", "weight": "*u8", "scales": "*fp32", "weight_scales": "*fp32"}
    types |= {"onto": "*bf16", "out": "*bf16", "num_rows": "i32", "one": "fp32"}
    assembly = compiled_for(_product_kernel, types, constants, capability=capability)
    (addend,) = re.findall(r"tt\.dot %\w+, %\w+, (%\w+)", assembly["ttir"])
    assert re.search(rf"{addend} = arith.constant dense<0\.0", assembly["ttir"])
    assert INSTRUCTIONS[capability] in assembly["ptx"]


@COMPILES
@pytest.mark.parametrize("group", [0, GROUP])
def test_wide_rows_are_fetched_ahead_and_rounded_by_one_instruction(group: int) -> None:
    from tlora_megatron.ops.quantised.triton_rows import _encode_kernel

    constants = {
        "WIDTH": 14336, "ROWS": 1, "COLUMNS": 16384, "GROUP": group, "FOLDS": False,
        "BY_HAND": False, "STAGES": 3,
    }  # fmt: skip
    types = {"x": "*bf16", "fold": "*fp32", "codes": "*u8", "scales": "*fp32", "num_rows": "i32"}
    ptx = compiled_for(_encode_kernel, types, constants)["ptx"]
    assert "cp.async.cg.shared.global" in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert ".ftz" not in ptx
    assert "ld.global.v" not in ptx, "rows are read once"


MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns the kernels on where only the interpreter runs them."""
    if INTERPRETED:
        for module in (rms_norm, parts):
            monkeypatch.setattr(module, "runs_triton", lambda x: True)


def assert_largest(x: Tensor, what: str) -> None:
    """What lies on x is its largest magnitude; it is taken off, and only once."""
    found = take_largest(x)
    assert found is not None, what
    sizes = x.float().abs()
    expected = sizes.masked_fill(sizes.isnan(), 0.0).max()
    assert found.parts.max().view(torch.float32).item() == expected.item(), what
    assert take_largest(x) is None, what


@RUNS
@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_swiglu_finds_the_largest_both_ways(value: float | None) -> None:
    x, dy = draw(5, 400, dtype=torch.bfloat16, scale=2.0), draw(5, 200, dtype=torch.bfloat16)
    if value is not None:
        x[1, 3] = value
    plain, plain_back = parts.swiglu_vjp(x)
    y, back = parts.swiglu_vjp(x, ONE_SCALE, ONE_SCALE)
    dx = back(dy)
    for found, same in ((y, plain), (dx, plain_back(dy))):
        torch.testing.assert_close(found, same, rtol=0, atol=0, equal_nan=True)
    assert_largest(y, "the product")
    assert_largest(dx, "its gradient")
    assert take_largest(plain) is None, "nobody asked"


@RUNS
@pytest.mark.parametrize(("rows", "width"), [(5, 200), (2, 4500)])
def test_norms_find_the_largest_both_ways(rows: int, width: int) -> None:
    x, residual = (draw(rows, width, dtype=torch.bfloat16, scale=3.0).roll(i, 0) for i in range(2))
    x[1, 3] = torch.inf
    norm = NormWeight(1 + draw(width, dtype=torch.bfloat16, scale=0.2), 1e-5)
    beside = rms_norm.Beside(ONE_SCALE, ONE_SCALE)
    plain = rms_norm.add_rms_norm_vjp(x, residual, norm)
    measured = rms_norm.add_rms_norm_vjp(x, residual, norm, beside)
    dtotal, dy = (draw(rows, width, dtype=torch.bfloat16).roll(i, 1) for i in range(2))
    found, expected = ((*way[:2], way[2](dtotal, dy)) for way in (measured, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert_largest(found[1], "the norm")
    assert_largest(found[2], "its gradient")


@RUNS
@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("kind", ["plain", "zeros", "inf", "tiny"])
def test_cast_of_a_kernel(kind: str, dtype: torch.dtype) -> None:
    x = draw(37, 304, dtype=torch.bfloat16, scale={"tiny": 1e-38}.get(kind, 30.0))
    if kind == "zeros":
        x.zero_()
    if kind == "inf":
        x[2, 5] = torch.inf
    parts_of = find_largest(x)
    parts_of[7] = x.float().abs().max().view(torch.int32)
    largest = take_largest(x)
    assert largest is not None
    codes = torch.full_like(x, 0xAA, dtype=torch.uint8)
    inverse = torch.full((1,), torch.nan, device=DEVICE)
    from tlora_megatron.ops.quantised.triton_tensor_scale import launch_cast

    launch_cast(x, largest, codes, inverse, dtype)
    amax = x.float().abs().max()
    scale = torch.full_like(amax, MOST[dtype]) / amax
    if kind in ("zeros", "inf"):
        scale = torch.ones_like(amax)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    assert inverse.item() == (1 / scale).item()
    finite = x.isfinite()
    values = (x.float() * scale).clamp(-MOST[dtype], MOST[dtype])[finite]
    found = codes.view(dtype)[finite]
    if not INTERPRETED:
        assert torch.equal(found.view(torch.uint8), values.to(dtype).view(torch.uint8))
    elif kind != "tiny":  # numbers that the interpreter's processor takes for zero
        # The interpreter's cast loses carries: right places and signs are all that it shows.
        smallest = torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(found.float(), values, rtol=0.5, atol=smallest)


def test_what_changed_since_is_not_taken() -> None:
    x = torch.ones(4, 4)
    assert isinstance(find_largest(x), Tensor)
    x.mul_(2)
    assert take_largest(x) is None
