"""One FP8 scale a tensor: largest magnitudes found in passing, and the cast that they make.

On a GPU they run as they are, elsewhere in the process of `test_interpreted_kernels`. That the bits
are Transformer Engine's is shown in `tests/gpu/test_transformer_engine_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import DEVICE, INTERPRETED, RUNS
from tests.unit.ops.frozen.test_frozen_kernels import draw
from tlora_megatron.ops.frozen import parts, rms_norm
from tlora_megatron.ops.frozen.parts import NormWeight
from tlora_megatron.ops.quantised.rows import (
    ONE_SCALE,
    find_largest,
    take_largest,
)

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
