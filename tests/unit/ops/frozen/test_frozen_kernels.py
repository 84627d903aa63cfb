"""The frozen parts' Triton kernels: outputs and every gradient by name.

On a GPU they run as they are. Elsewhere they run in Triton's interpreter, which Triton chooses when
it is imported, so in the process of `test_interpreted_kernels`: `TRITON_INTERPRET=1 pytest` on this
file runs them here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import COMPILES, DEVICE, INTERPRETED, RUNS, compiled_for
from tlora_megatron.ops.frozen import losses as cross_entropy
from tlora_megatron.ops.frozen import parts as swiglu
from tlora_megatron.ops.frozen import rms_norm, rotary
from tlora_megatron.ops.frozen.parts import HeadNorms, NormWeight

TOLERANCE = {
    torch.float32: 2e-6,
    # The interpreter cuts bf16 off instead of rounding.
    torch.bfloat16: 2.4e-2 if INTERPRETED else 1.2e-2,
    torch.float16: 1.5e-3,
}
"""Largest error over the largest value. In half precision the reference rounds more often."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Turns the kernels on, or off."""

    def switch(on: bool) -> None:
        for module in (cross_entropy, rotary, rms_norm, swiglu):
            monkeypatch.setattr(module, "runs_triton", lambda x: on)

    return switch


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Numbers of a fixed seed that depend on the shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def run(function: Callable[..., Any], tensors: dict[str, Tensor], *rest: Any) -> dict[str, Tensor]:
    """Outputs of a function of named tensors, and its gradient for each of them."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors.values()]
    outputs = function(*leaves, *rest)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [draw(*out.shape, dtype=out.dtype) for out in outputs]
    torch.autograd.backward(outputs, grads)
    named = {f"output {i}": out for i, out in enumerate(outputs)}
    return named | {f"d{n}": t.grad for n, t in zip(tensors, leaves, strict=True)}


def both(fused: Callable[[bool], None], *call: Any) -> list[dict[str, Tensor]]:
    """What `run` finds with the kernels on, and with the kernels off."""
    found = []
    for on in (True, False):
        fused(on)
        found.append(run(*call))
    return found


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        got = actual[name]
        assert got.shape == value.shape, name
        assert got.dtype == value.dtype, name
        error = (got.double() - value.double()).abs().max() / value.double().abs().max()
        assert error < TOLERANCE[value.dtype], f"{name}: {error.item()}"


@RUNS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 1, 63), (3, 1, 4500), (7, 2, 128)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(
    has_residual: bool, shape: tuple[int, ...], dtype: torch.dtype, fused: Callable[[bool], None]
) -> None:
    tensors, rest = {"x": draw(*shape, dtype=dtype, scale=3.0)}, [None]
    if has_residual:
        tensors["residual"], rest = draw(*shape, dtype=dtype).flip(0), []
    weight = 1 + draw(shape[-1], dtype=dtype, scale=0.2)
    fused(True)
    actual = run(rms_norm.add_rms_norm, tensors, *rest, weight, 1e-5)
    fused(False)  # in fp32: in half precision the reference itself is an ulp off
    wide = {n: t.float() for n, t in tensors.items()}
    wide = run(rms_norm.add_rms_norm, wide, *rest, weight.float(), 1e-5)
    assert_equal(actual, {name: value.to(dtype) for name, value in wide.items()})


@RUNS
@DTYPES
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm_that_rounds_once(
    has_residual: bool, zero_centered: bool, dtype: torch.dtype, fused: Callable[[bool], None]
) -> None:
    shape = (5, 63)
    x, residual = (draw(*shape, dtype=dtype, scale=3.0).roll(i, 0) for i in range(2))
    given = residual if has_residual else None
    weight_H = draw(shape[-1], dtype=dtype, scale=0.2) + (0 if zero_centered else 1)
    weight = NormWeight(weight_H, 1e-5, zero_centered)
    fused(True)
    total, normed, back = rms_norm.add_rms_norm_vjp(x, given, weight)
    grads = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype).flip(0)
    leaf = total.float().requires_grad_()
    wide = rms_norm.rms_norm_once_reference(leaf, weight._replace(weight_H=weight_H.float()))
    torch.autograd.backward((leaf * 1, wide), tuple(grad.float() for grad in grads))
    assert leaf.grad is not None
    actual = {"total": total, "normed": normed, "dx": back(*grads)}
    again = torch.full_like(normed, torch.nan)
    rms_norm.norm_into(again, total, weight)
    assert torch.equal(again, normed)
    summed = x if given is None else x + given
    expected = {"total": summed, "normed": wide.to(dtype), "dx": leaf.grad.to(dtype)}
    assert_equal(actual, expected)


@RUNS
@pytest.mark.parametrize("rounds_once", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm_of_an_fp32_stream(
    has_residual: bool, rounds_once: bool, fused: Callable[[bool], None]
) -> None:
    shape, low = (5, 63), torch.float16
    stream = draw(*shape, dtype=torch.float32, scale=3.0)
    x = draw(*shape, dtype=low).flip(0) if has_residual else stream
    weight_H = 1 + draw(shape[-1], dtype=low, scale=0.2)
    weight = NormWeight(weight_H, 1e-5, rounds_once=rounds_once)
    grads = draw(*shape, dtype=torch.float32), draw(*shape, dtype=low).flip(0)
    summed = x + stream if has_residual else stream
    leaf = summed.double().requires_grad_()
    exact = leaf / (leaf.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight_H.double()
    torch.autograd.backward((leaf * 1, exact), tuple(grad.double() for grad in grads))
    assert leaf.grad is not None
    for on in (True, False):
        fused(on)
        total, normed, back = rms_norm.add_rms_norm_vjp(x, stream if has_residual else None, weight)
        assert torch.equal(total, summed), "no rounding"
        dx = back(*grads)
        assert_equal({"normed": normed}, {"normed": exact.detach().to(low)})
        assert dx.dtype == torch.float32
        error = (dx.double() - leaf.grad).abs().max() / leaf.grad.abs().max()
        # Autograd rounds the gradient in front of a weight of its own.
        assert error < (2e-6 if on or rounds_once else 1e-3)


@RUNS
def test_rms_norm_of_one_output_only(fused: Callable[[bool], None]) -> None:
    """The other output's gradient is then absent, not zero."""
    fused(True)
    weight = torch.ones(8, device=DEVICE)
    for index in (0, 1):
        x = draw(4, 8, dtype=torch.float32).requires_grad_()
        rms_norm.add_rms_norm(x, None, weight, 1e-5)[index].sum().backward()
        y = x.detach().requires_grad_()
        (y if index == 0 else rms_norm.rms_norm_reference(y, weight, 1e-5)).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


@RUNS
@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 63), (2, 2500)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype, fused: Callable[[bool], None]) -> None:
    tensors = {"x": draw(rows, 1, 2 * width, dtype=dtype, scale=2.0)}
    assert_equal(*both(fused, swiglu.swiglu, tensors))


@RUNS
@DTYPES
@pytest.mark.parametrize(
    ("rows", "groups", "per_group", "dim", "turned"),
    [(1, 1, 1, 8, 8), (37, 2, 3, 16, 16), (40, 3, 1, 20, 20), (33, 2, 2, 24, 16), (5, 1, 1, 16, 4)],
)
def test_unpack_qkv(
    rows: int,
    groups: int,
    per_group: int,
    dim: int,
    turned: int,
    dtype: torch.dtype,
    fused: Callable[[bool], None],
) -> None:
    tensors = {"mixed": draw(rows, groups, per_group + 2, dim, dtype=dtype)}
    angles = draw(rows, turned // 2, dtype=torch.float32, scale=3.0).repeat(1, 2)
    cos_sin = angles.cos().to(dtype), angles.sin().to(dtype)
    results = both(fused, rotary.unpack_qkv, tensors, *cos_sin)
    assert_equal(*results)
    fused(True)  # the kernel takes the rotation in fp32 too
    wide = run(rotary.unpack_qkv, tensors, angles.cos(), angles.sin())
    assert_equal(wide, results[1])


KINDS = {"twice": (False, False), "once": (False, True), "zero-centred": (True, True)}
"""A norm's `zero_centered` and `rounds_once`."""


def head_norms(kind: str, dim: int, dtype: torch.dtype) -> HeadNorms:
    """Weights far from 1, one of them zero."""
    zero_centered, rounds_once = KINDS[kind]
    weight = draw(2, dim, dtype=dtype, scale=0.5) + (0 if zero_centered else 1)
    weight[0, 0] = -1 if zero_centered else 0
    query, key = (NormWeight(row, 1e-5, zero_centered, rounds_once) for row in weight)
    return HeadNorms(query, key)


def wide_norms(norms: HeadNorms, dtype: torch.dtype) -> HeadNorms:
    """The same values in another dtype."""
    return HeadNorms(*(norm._replace(weight_H=norm.weight_H.to(dtype)) for norm in norms))


@RUNS
@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        ("twice", torch.float32, (1, 1, 1, 8, 8)),
        ("once", torch.float32, (35, 2, 2, 16, 12)),
        ("zero-centred", torch.float32, (33, 1, 1, 20, 20)),
        ("twice", torch.float16, (34, 1, 2, 20, 20)),
        ("once", torch.bfloat16, (34, 2, 1, 16, 16)),
    ],
    ids=str,
)
def test_unpack_qkv_of_normed_heads(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...], fused: Callable[[bool], None]
) -> None:
    rows, groups, per_group, dim, turned = shape
    tensors = {"mixed": draw(rows, groups, per_group + 2, dim, dtype=dtype, scale=2.0)}
    norms = head_norms(kind, dim, dtype)
    angles = draw(rows, turned // 2, dtype=torch.float32, scale=3.0).repeat(1, 2)
    fused(True)
    actual = run(rotary.unpack_qkv, tensors, angles.cos(), angles.sin(), norms)
    fused(False)  # in fp32: in half precision the reference itself is an ulp off
    rest = angles.cos(), angles.sin(), wide_norms(norms, torch.float32)
    wide = run(rotary.unpack_qkv, {"mixed": tensors["mixed"].float()}, *rest)
    assert_equal(actual, {name: value.to(dtype) for name, value in wide.items()})
    fused(True)
    outs, back = rotary.unpack_qkv_vjp(tensors["mixed"], angles.cos(), angles.sin(), norms)
    grads = [draw(*out.shape, dtype=dtype) for out in outs]
    assert torch.equal(back(*grads), actual["dmixed"])
    assert all(torch.equal(out, actual[f"output {i}"]) for i, out in enumerate(outs))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_normed_heads_by_differences(kind: str) -> None:
    """The definition, in fp64 on the CPU: both ways of calling it, and finite differences."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(3, 2, 4, 6, generator=generator, dtype=torch.float64)
    angles = torch.randn(3, 3, generator=generator, dtype=torch.float64).repeat(1, 2)
    norms = head_norms(kind, 6, torch.float64)
    norms = HeadNorms(*(norm._replace(weight_H=norm.weight_H.cpu()) for norm in norms))
    rest = angles.cos(), angles.sin(), norms
    if not norms.query.zero_centered:  # that form computes in fp32
        leaf = mixed.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: rotary.unpack_qkv(x, *rest), leaf)
    outs, back = rotary.unpack_qkv_vjp(mixed, *rest)
    leaf = mixed.clone().requires_grad_()
    by_autograd = rotary.unpack_qkv(leaf, *rest)
    grads = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outs]
    torch.autograd.backward(by_autograd, grads)
    assert torch.equal(back(*grads), leaf.grad)
    query = mixed[:, :, :2].reshape(3, 1, 4, 6)
    gamma = norms.query.weight_H + norms.query.zero_centered
    normed = query / (query.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma
    turned = rotary.rotate_halves(normed, *rest[:2])
    torch.testing.assert_close(outs[0], turned.squeeze(1), rtol=1e-6, atol=1e-6)


@RUNS
@DTYPES
@pytest.mark.parametrize(("width", "valid"), [(50, 50), (8192, 8190), (20000, 20000)])
def test_cross_entropy(
    width: int, valid: int, dtype: torch.dtype, fused: Callable[[bool], None]
) -> None:
    logits = draw(5, width, dtype=dtype, scale=4.0)
    labels = torch.tensor([0, valid - 1, 3, 17, -1], device=DEVICE)
    exact = logits[:, :valid].double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact[:4], labels[:4], reduction="none")
    losses.sum().backward()
    for on in (True, False):
        fused(on)
        kept = logits.clone()
        without = cross_entropy.cross_entropy_(kept, labels, valid, gradient=False)
        assert torch.equal(kept, logits)
        actual = cross_entropy.cross_entropy_(kept, labels, valid, gradient=True)
        assert actual.dtype == torch.float32
        for name, value in (("with", actual), ("without", without)):
            torch.testing.assert_close(value[:4].double(), losses, rtol=2e-6, atol=2e-6, msg=name)
        assert not kept[:, valid:].any()
        torch.testing.assert_close(
            kept[:4, :valid].double(), exact.grad[:4], rtol=TOLERANCE[dtype], atol=1e-6
        )


@RUNS
@pytest.mark.parametrize("on", [True, False], ids=["fused", "reference"])
def test_cross_entropy_of_a_split_vocabulary(on: bool, fused: Callable[[bool], None]) -> None:
    """The last part holds no token at all."""
    fused(on)
    logits = draw(6, 96, dtype=torch.float32, scale=4.0)
    labels = torch.arange(6, device=DEVICE) * 12
    whole = logits[:, :64].contiguous()
    expected = cross_entropy.cross_entropy_(whole, labels, 64, gradient=True)
    parts = [logits[:, begin : begin + 32].contiguous() for begin in (0, 32, 64)]
    sizes = (32, 32, 0)
    statistics = [
        cross_entropy.row_statistics(part, labels - 32 * i, size)
        for i, (part, size) in enumerate(zip(parts, sizes, strict=True))
    ]
    losses, lse = cross_entropy.merge_statistics(torch.stack(statistics))
    torch.testing.assert_close(losses, expected)
    for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        cross_entropy.write_gradient_(part, labels - 32 * i, lse, size)
    torch.testing.assert_close(torch.cat(parts, dim=1)[:, :64], whole)
    assert not parts[2].any()


WARPS = {"rms_norm": 8, "swiglu": 4, "rotary": 4, "cross_entropy": 16}


def _launches() -> list[tuple[str, str, dict[str, str], dict[str, int]]]:
    """Module, kernel, types of its runtime arguments and constants, on Llama-3.1-8B's shapes."""
    bf16, fp32 = "*bf16", "*fp32"
    norm = {"WIDTH": 4096, "ROWS": 1, "COLUMNS": 4096}
    heads = {"GROUPS": 8, "PER_GROUP": 4, "HALF": 64, "TURNED": 64, "ROWS": 32, "COLUMNS": 64}
    vocabulary = {"VALID": 128256, "WIDTH": 128256, "BLOCK": 8192}
    forward = dict.fromkeys(("x", "residual", "weight", "total", "out"), bf16)
    forward |= {"rstd": fp32, "num_rows": "i32", "eps": "fp32"}
    backward = dict.fromkeys(("dy", "dtotal", "x", "weight", "dx"), bf16)
    backward |= {"rstd": fp32, "num_rows": "i32"}
    heads_of = ("mixed", "query", "key", "value", "cos", "sin", "before")
    parts = dict.fromkeys((*heads_of, "query_weight", "key_weight"), bf16)
    parts |= {"num_rows": "i32", "eps": "fp32"}
    rows = {"logits": bf16, "labels": "*i64", "lse": fp32}
    statistics = {"logits": bf16, "labels": "*i64", "statistics": fp32, "num_rows": "i32"}
    block = {"WIDTH": 14336, "BLOCK": 1024}
    launches = [
        ("swiglu", "_forward_kernel", {"x": bf16, "y": bf16}, block),
        ("swiglu", "_backward_kernel", dict.fromkeys(("dy", "x", "dx"), bf16), block),
        ("cross_entropy", "_gradient_kernel", rows, vocabulary),
    ]
    for flag in (0, 1):
        launches += [
            ("rms_norm", "_forward_kernel", forward, norm | {"HAS_RESIDUAL": flag}),
            ("rms_norm", "_backward_kernel", backward, norm | {"HAS_DTOTAL": flag}),
            ("rotary", "_rotate_heads_kernel", parts, heads | {"BACKWARD": flag}),
            ("rotary", "_rotate_heads_kernel", parts, heads | {"BACKWARD": flag, "NORMED": 1}),
            ("rotary", "_rotate_heads_kernel", parts, heads | {"BACKWARD": flag, "TURNED": 32}),
            ("cross_entropy", "_statistics_kernel", statistics, vocabulary | {"GRADIENT": flag}),
        ]
    return launches


@COMPILES
@pytest.mark.parametrize(("module", "kernel", "types", "constants"), _launches())
def test_compiles_for_hopper(
    module: str, kernel: str, types: dict[str, str], constants: dict[str, int]
) -> None:
    """Needs no GPU; what the interpreter accepts, the compiler may not."""
    pytest.importorskip("triton")
    found = importlib.import_module(f"tlora_megatron.ops.frozen.{module}_triton")
    compiled = compiled_for(getattr(found, kernel), types, constants, num_warps=WARPS[module])
    writes_rows = kernel != "_statistics_kernel" or constants["GRADIENT"]
    assert ("st.global.v4" in compiled["ptx"]) == writes_rows, "rows move 16 bytes at a time"
