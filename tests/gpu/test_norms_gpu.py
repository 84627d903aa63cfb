"""Normed heads, and norms of an fp32 stream, against fp32 and fp64; memory comes poisoned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.helpers.kernel_case import poisoned_memory
from tests.unit.ops.frozen.test_frozen_kernels import KINDS, head_norms, wide_norms
from tlora_megatron.ops.frozen.parts import NormWeight
from tlora_megatron.ops.frozen.rms_norm import (
    add_rms_norm,
    add_rms_norm_vjp,
    norm_into,
    rms_norm_once_reference,
)
from tlora_megatron.ops.frozen.rotary import (
    rotate_halves,
    unpack_qkv,
    unpack_qkv_reference,
    unpack_qkv_vjp,
)

pytestmark = pytest.mark.gpu
ROWS, GROUPS, PER_GROUP, DIM = 1003, 2, 4, 128
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 4e-6}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def rotation(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(ROWS), 0.5 ** torch.arange(DIM // 2)).repeat(1, 2).cuda()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_outputs_and_gradient(kind: str, dtype: torch.dtype) -> None:
    mixed = draw(ROWS, GROUPS, PER_GROUP + 2, DIM, dtype=dtype) * 3
    mixed[5] *= 1e-3  # where eps counts
    norms, turns = head_norms(kind, DIM, dtype), rotation(torch.float32)
    outs, back = unpack_qkv_vjp(mixed, *turns, norms)
    grads = [draw(*out.shape, dtype=dtype) for out in outs]
    dmixed = back(*grads)
    leaf = mixed.float().requires_grad_()
    wide = unpack_qkv_reference(leaf, *turns, wide_norms(norms, torch.float32))
    torch.autograd.backward(wide, [grad.float() for grad in grads])
    assert leaf.grad is not None
    for name, found, expected in zip(
        ("query", "key", "value", "dmixed"), (*outs, dmixed), (*wide, leaf.grad), strict=True
    ):
        assert error(found, expected.detach().double()) < TOLERANCE[dtype], name
    rows = torch.arange(ROWS, device="cuda") != 5  # the largest gradients are that row's
    assert error(dmixed[rows], leaf.grad[rows].double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["twice", "once"])
def test_forward_rounds_where_the_norm_s_own_kernel_does(kind: str) -> None:
    """To the bit the norm's output, turned in fp32 and rounded."""
    dtype = torch.bfloat16
    mixed, norms = draw(ROWS, GROUPS, PER_GROUP + 2, DIM, dtype=dtype), head_norms(kind, DIM, dtype)
    turns = rotation(torch.float32)
    query, key, value = unpack_qkv(mixed, *turns, norms)
    raw = mixed[:, :, PER_GROUP, :].contiguous()
    weight = norms.key
    normed = (
        add_rms_norm(raw, None, weight.weight_H, weight.eps)[1]
        if kind == "twice"
        else rms_norm_once_reference(raw, weight)
    )
    turned = rotate_halves(normed[:, None].float(), *turns).squeeze(1)
    assert query.isfinite().all()
    assert torch.equal(value, mixed[:, :, PER_GROUP + 1])
    # A rounding apart where a sum of 128 squares is taken in another order.
    differ = (key != turned.to(dtype)).float().mean()
    assert differ < 2e-2, differ


def test_a_nan_row_stays_alone() -> None:
    mixed = draw(ROWS, GROUPS, PER_GROUP + 2, DIM, dtype=torch.bfloat16)
    mixed[37] = torch.nan
    outs, back = unpack_qkv_vjp(
        mixed, *rotation(torch.float32), head_norms("once", DIM, torch.bfloat16)
    )
    dmixed = back(*(torch.ones_like(out) for out in outs))
    # The gradient of a value is a copy.
    for found in (*outs, dmixed):
        bad = found.isnan().flatten(1).any(1).nonzero().flatten().tolist()
        assert bad == [37]


@pytest.mark.parametrize("rounds_once", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_an_fp32_stream_around_bf16(has_residual: bool, rounds_once: bool) -> None:
    stream = draw(ROWS, 4096, dtype=torch.float32) * 100
    x = draw(ROWS, 4096, dtype=torch.bfloat16) if has_residual else stream
    weight_H = 1 + draw(4096, dtype=torch.bfloat16) * 0.2
    weight = NormWeight(weight_H, 1e-5, rounds_once=rounds_once)
    total, normed, back = add_rms_norm_vjp(x, stream if has_residual else None, weight)
    summed = x + stream if has_residual else stream
    assert torch.equal(total, summed), "no rounding"
    leaf = summed.double().requires_grad_()
    exact = leaf / (leaf.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight_H.double()
    assert normed.dtype == torch.bfloat16
    assert error(normed, exact.detach()) < TOLERANCE[torch.bfloat16]
    again = torch.empty_like(normed)
    norm_into(again, total, weight)
    assert torch.equal(again, normed)
    grads = draw(ROWS, 4096, dtype=torch.float32), draw(ROWS, 4096, dtype=torch.bfloat16)
    torch.autograd.backward((leaf * 1, exact), tuple(grad.double() for grad in grads))
    dx = back(*grads)
    assert leaf.grad is not None
    assert dx.dtype == torch.float32
    assert error(dx, leaf.grad) < TOLERANCE[torch.float32]
