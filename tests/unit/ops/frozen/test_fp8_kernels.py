"""Kernels of frozen parts that leave FP8 codes: the bits of those without, and of the quantiser.

On a GPU they run as they are, elsewhere in the process of `test_interpreted_kernels`.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import DEVICE, INTERPRETED, RUNS
from tests.unit.ops.frozen.test_frozen_kernels import draw, head_norms
from tlora_megatron.ops.frozen import parts, rms_norm, rotary
from tlora_megatron.ops.frozen.parts import NormWeight
from tlora_megatron.ops.quantised.rows import GROUP, encode_rows, handed_rows
from tlora_megatron.ops.quantised.weight import QuantWeight

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KINDS = pytest.mark.parametrize("kind", ["channel", "block"])


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns the kernels on where only the interpreter runs them."""
    if INTERPRETED:
        for module in (rotary, rms_norm, parts):
            monkeypatch.setattr(module, "runs_triton", lambda x: True)


def skip_fp32_on_gpus(dtype: torch.dtype) -> None:
    """Bits of fp32 results are compared in the interpreter only: no rounding hides the last one."""
    if dtype == torch.float32 and not INTERPRETED:
        pytest.skip("on a GPU the compiler fuses fp32 multiply-adds of the two kernels differently")


def weight_of(kind: str, num_rows: int, num_columns: int) -> QuantWeight:
    """No codes, which producers do not read, but scales far apart."""
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=DEVICE)
    shape = (num_rows,) if kind == "channel" else (-(-num_rows // GROUP), -(-num_columns // GROUP))
    generator = torch.Generator().manual_seed(num_rows)
    return QuantWeight(codes, (torch.rand(shape, generator=generator) + 1e-2).to(DEVICE))


def assert_codes(x: Tensor, weight: QuantWeight, *, gradient: bool = False) -> None:
    """The codes on x are those that the linear would make of it."""
    group, fold = (None, weight.fold_N) if gradient else (weight.group, None)
    handed = handed_rows(x, group, fold)
    assert handed is not None
    # By the definition, on the CPU.
    expected = encode_rows(x.cpu(), group=group, fold_K=None if fold is None else fold.cpu())
    assert torch.equal(handed.codes_TK.cpu(), expected.codes_TK)
    torch.testing.assert_close(handed.scales.cpu(), expected.scales, rtol=0, atol=0, equal_nan=True)


@RUNS
@DTYPES
@KINDS
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 200)])
def test_swiglu(rows: int, width: int, kind: str, dtype: torch.dtype) -> None:
    check_swiglu(rows, width, kind, dtype)


def check_swiglu(rows: int, width: int, kind: str, dtype: torch.dtype) -> None:
    x, dy = draw(rows, 2 * width, dtype=dtype, scale=2.0), draw(rows, width, dtype=dtype)
    if rows > 1:
        x[1, 3] = torch.nan
    plain, plain_back = parts.swiglu_vjp(x)
    row, column = weight_of(kind, 24, width), weight_of(kind, 2 * width, 24)
    y, back = parts.swiglu_vjp(x, row, column)
    dx, expected = back(dy), plain_back(dy)
    for found, same in ((y, plain), (dx, expected)):
        torch.testing.assert_close(found, same, rtol=0, atol=0, equal_nan=True)
    assert_codes(y, row)
    if width <= 14336:  # wider rows do not fit the registers
        assert_codes(dx, column, gradient=True)


@RUNS
@pytest.mark.parametrize(
    ("rows", "width", "has_residual", "kind", "dtype"),
    [
        (5, 200, True, "channel", torch.bfloat16),
        (5, 200, False, "block", torch.float32),
        (2, 4500, True, "block", torch.bfloat16),
        (2, 4500, False, "channel", torch.float32),
    ],
    ids=str,
)
def test_rms_norm(rows: int, width: int, has_residual: bool, kind: str, dtype: torch.dtype) -> None:
    skip_fp32_on_gpus(dtype)
    x, residual = (draw(rows, width, dtype=dtype, scale=3.0).roll(i, 0) for i in range(2))
    x[1, 3] = torch.inf
    norm = NormWeight(1 + draw(width, dtype=dtype, scale=0.2), 1e-5)
    given = residual if has_residual else None
    beside = rms_norm.Beside(weight_of(kind, 24, width), weight_of(kind, width, 24))
    assert beside.column is not None
    assert beside.row is not None
    plain = rms_norm.add_rms_norm_vjp(x, given, norm)
    quantized = rms_norm.add_rms_norm_vjp(x, given, norm, beside)
    dtotal, dy = (draw(rows, width, dtype=dtype).roll(i, 1) for i in range(2))
    for grads in ((dtotal, dy), (None, dy)):
        found, expected = ((*way[:2], way[2](*grads)) for way in (quantized, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert_codes(found[2], beside.row, gradient=True)
    assert_codes(quantized[1], beside.column)


@RUNS
@pytest.mark.parametrize(
    ("shape", "normed", "kind", "dtype"),
    [
        ((1, 1, 1, 8, 8), False, "channel", torch.float32),
        ((5, 2, 3, 16, 16), False, "block", torch.bfloat16),
        ((5, 2, 3, 16, 16), True, "channel", torch.bfloat16),
        ((3, 3, 1, 20, 12), True, "block", torch.float32),
        ((3, 3, 1, 20, 12), False, "channel", torch.bfloat16),
    ],
    ids=str,
)
def test_gradient_of_the_fused_projection(
    shape: tuple[int, ...], normed: bool, kind: str, dtype: torch.dtype
) -> None:
    skip_fp32_on_gpus(dtype)
    rows, groups, per_group, dim, turned = shape
    mixed = draw(rows, groups, per_group + 2, dim, dtype=dtype)
    angles = draw(rows, turned // 2, dtype=torch.float32, scale=3.0).repeat(1, 2)
    norms = head_norms("zero-centred", dim, dtype) if normed else None
    rest = angles.cos(), angles.sin(), norms
    column = weight_of(kind, mixed[0].numel(), 24)
    outs, plain_back = rotary.unpack_qkv_vjp(mixed, *rest)
    _, back = rotary.unpack_qkv_vjp(mixed, *rest, column)
    grads = [draw(*out.shape, dtype=dtype) for out in outs]
    grads[2][0, 0, 1] = torch.nan
    expected, found = plain_back(*grads).view(rows, -1), back(*grads)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert_codes(found, column, gradient=True)


@RUNS
@pytest.mark.parametrize("quantised", [False, True])
def test_the_way_back_through_the_rotation_keeps_no_projection(quantised: bool) -> None:
    mixed = draw(5, 2, 5, 16, dtype=torch.bfloat16)
    angles = draw(5, 8, dtype=torch.float32).repeat(1, 2)
    column = weight_of("channel", mixed[0].numel(), 24) if quantised else None
    kept = weakref.ref(mixed)
    _, back = rotary.unpack_qkv_vjp(mixed, angles.cos(), angles.sin(), None, column)
    del mixed
    assert kept() is None
    del back
