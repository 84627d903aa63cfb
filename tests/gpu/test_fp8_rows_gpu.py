"""FP8 codes and products by Triton on the shapes of models, against their definition."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from tests.unit.ops.frozen.test_fp8_kernels import assert_codes, check_swiglu, weight_of
from tests.unit.ops.frozen.test_frozen_kernels import head_norms
from tests.unit.ops.quantised.test_quant_kernels import (
    assert_same_rows,
    draw_weight,
    odd_rows,
    row_error,
)
from tlora_megatron.ops.frozen.parts import NormWeight
from tlora_megatron.ops.frozen.rms_norm import Beside, add_rms_norm_vjp
from tlora_megatron.ops.frozen.rotary import unpack_qkv_vjp
from tlora_megatron.ops.quantised.rows import GROUP, QuantRows, encode_rows
from tlora_megatron.ops.quantised.triton_products import (
    launch_forward,
    launch_input_gradient,
    transposed,
)
from tlora_megatron.ops.quantised.triton_rows import launch_encode
from tlora_megatron.ops.quantised.weight import QuantWeight, forward_product, input_gradient

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


WIDTHS = (8, 24, 128, 1000, 4096, 6144, 8200, 14336, 28672)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("width", WIDTHS)
def test_codes_of_rows_to_the_bit(width: int, group: int | None, folds: bool) -> None:
    # More rows than wide ones have thread blocks, which then take several each.
    x = odd_rows(width, num_rows=311).bfloat16()
    fold = torch.rand(width) + 1e-3 if folds else None
    expected = encode_rows(x, group=group, fold_K=fold)
    actual = encode_rows(x.cuda(), group=group, fold_K=None if fold is None else fold.cuda())
    assert_same_rows(QuantRows(actual.codes_TK.cpu(), actual.scales.cpu()), expected)


def test_all_numbers_between_two_codes() -> None:
    """Every bf16 value at several scales: what one instruction rounds is what the bits say."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() <= 448]
    x = values.view(2, -1)  # 448 is in both rows, whose scale is 1
    fold = torch.full((x.shape[1],), 1.7)
    for folds in (None, fold):
        expected = encode_rows(x, fold_K=folds)
        found = encode_rows(x.cuda(), fold_K=None if folds is None else folds.cuda())
        assert torch.equal(found.codes_TK.cpu(), expected.codes_TK)


def _on_gpu(weight: QuantWeight) -> QuantWeight:
    return QuantWeight(weight.codes_NK.cuda(), weight.scales.cuda())


def _rows(weight: QuantWeight, num_rows: int) -> tuple[Tensor, Tensor]:
    x, dy = (torch.randn(num_rows, size, device="cuda") for size in reversed(weight.shape))
    return x.bfloat16(), dy.bfloat16()


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1000, 4112), (24, 16)])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_products_against_the_definition(kind: str, shape: tuple[int, int]) -> None:
    weight = _on_gpu(draw_weight(kind, *shape))
    x, dy = _rows(weight, 257)
    rows, back = weight.rows_of(x), weight.gradient_rows_of(dy)
    y = forward_product(rows, weight.codes_NK, weight.scales, x.dtype)
    dx = input_gradient(back, weight.codes_NK, weight.scales, x.dtype)
    given = weight.codes_NK, weight.scales
    wide = launch_forward(rows, *given, torch.float32, None)
    assert row_error(wide, y) < 2e-3
    assert row_error(launch_input_gradient(back, *given, torch.float32, None), dx) < 2e-3
    onto, onto_back = torch.randn_like(y).bfloat16(), torch.randn_like(dx).bfloat16()
    rounded = launch_forward(rows, *given, x.dtype, onto.clone())
    # In one instruction with the scales: rounding twice would change several in a hundred.
    assert (rounded != (wide + onto).bfloat16()).float().mean() < 1e-3, "rounded once"
    found = launch_input_gradient(back, *given, x.dtype, onto_back.clone())
    assert row_error(found, dx + onto_back) < 4e-3


def test_long_sums_of_one_sign_keep_fp32() -> None:
    """Sums that tensor cores alone would make of 14,336 such products are off by 1e-2."""
    depth = 14336
    rows = encode_rows(torch.rand(128, depth, device="cuda") + 0.5)
    weight = encode_rows(torch.rand(256, depth, device="cuda") + 0.5)
    expected = forward_product(rows, weight.codes_TK, weight.scales, torch.float32)
    found = launch_forward(rows, weight.codes_TK, weight.scales, torch.float32, None)
    assert row_error(found, expected) < 1e-3


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_a_row_depends_on_itself_alone(kind: str) -> None:
    weight = _on_gpu(draw_weight(kind, 6144, 4096))
    x, dy = _rows(weight, 700)
    rows, back = weight.rows_of(x), weight.gradient_rows_of(dy)

    def run(begin: int, end: int) -> list[Tensor]:
        parts = (QuantRows(r.codes_TK[begin:end], r.scales[begin:end]) for r in (rows, back))
        launches = (launch_forward, launch_input_gradient)
        args = weight.codes_NK, weight.scales, torch.bfloat16, None
        return [launch(part, *args) for launch, part in zip(launches, parts, strict=True)]

    whole = run(0, 700)
    rows.scales[3], back.scales[5] = math.nan, math.nan
    for expected, alone, again in zip(whole, run(128, 200), run(0, 700), strict=True):
        assert torch.equal(alone, expected[128:200])
        assert torch.equal(again[6:], expected[6:])
        assert again.isnan().any(1).sum() == 1


def test_bytes_are_transposed() -> None:
    codes = torch.randint(0, 256, (1000, 4112), dtype=torch.uint8, device="cuda")
    assert torch.equal(transposed(codes), codes.t())


def test_other_tiles_give_the_same_codes() -> None:
    x = odd_rows(14336, num_rows=300).bfloat16().cuda()
    from tlora_megatron.ops.quantised.triton_rows import RowTile

    codes, scales = launch_encode(x, None, None)
    for tile in (RowTile(1, 16384, 8, 1), RowTile(1, 16384, 32, 2)):
        other, other_scales = launch_encode(x, None, None, tile)
        assert torch.equal(codes, other)
        torch.testing.assert_close(scales, other_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [14336, 7168, 28672])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_swiglu_leaves_codes(kind: str, width: int) -> None:
    check_swiglu(301, width, kind, torch.bfloat16)


@pytest.mark.parametrize("width", [4096, 8192, 1000])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_norms_leave_codes_both_ways(kind: str, width: int) -> None:
    x, residual, dtotal, dy = (
        torch.randn(1003, width, device="cuda").bfloat16() * scale for scale in (3, 1, 1, 1)
    )
    x[7, 5] = math.inf
    norm = NormWeight(torch.rand(width, device="cuda").bfloat16() + 0.5, 1e-5, rounds_once=False)
    column, row = weight_of(kind, 16, width), weight_of(kind, width, 16)
    plain = add_rms_norm_vjp(x, residual, norm)
    total, out, back = add_rms_norm_vjp(x, residual, norm, Beside(column, row))
    found, expected = (total, out, back(dtotal, dy)), (*plain[:2], plain[2](dtotal, dy))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert_codes(out, column)
    assert_codes(found[2], row, gradient=True)


@pytest.mark.parametrize(
    "shape", [(8, 4, 128), (2, 8, 128), (1, 16, 128), (8, 1, 64), (40, 1, 128)]
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_the_way_back_through_the_rotation_leaves_codes(
    kind: str, normed: bool, shape: tuple[int, int, int]
) -> None:
    groups, per_group, dim = shape
    mixed = torch.randn(515, groups, per_group + 2, dim, device="cuda").bfloat16()
    angles = torch.rand(515, dim // 2, device="cuda").repeat(1, 2)
    norms = head_norms("twice", dim, torch.bfloat16) if normed else None
    rest = angles.cos().bfloat16(), angles.sin().bfloat16(), norms
    column = weight_of(kind, mixed[0].numel(), 16)
    outs, plain = unpack_qkv_vjp(mixed, *rest)
    grads = [torch.randn_like(out) for out in outs]
    found, expected = unpack_qkv_vjp(mixed, *rest, column)[1](*grads), plain(*grads).flatten(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_codes(found, column, gradient=True)


def test_the_cache_is_left_to_factors() -> None:
    """Or those of a wide row came from L2 with every row."""
    from tlora_megatron.ops.quantised.triton_rows import _encode

    launch_encode(torch.randn(300, 28672, device="cuda").bfloat16(), None, torch.rand(28672).cuda())
    driver, percent = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
    found = []
    for compiled in _encode._compiled.values():
        function = ctypes.c_void_p(compiled.function)
        assert driver.cuFuncGetAttribute(ctypes.byref(percent), 9, function) == 0
        found.append(percent.value)
    # -1: the driver's own choice; 0: blocks of narrow rows need none.
    assert found
    assert set(found) <= set(range(101)), sorted(set(found))
