"""Losses over log-probabilities against autograd in fp64, written as Tinker documents them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tlora_megatron.ops.frozen.losses import KINDS, TokenInputs, row_weights, token_losses

T = 257
LOW, HIGH, BETA = 0.8, 1.2, 0.05
Documented = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From log-probabilities, sampled ones, advantages and weights to the summed loss."""


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """Probability over that of sampling."""
    return (p - q).exp()


DOCUMENTED: dict[str, Documented] = {
    "cross_entropy": lambda p, q, a, w: -(p * w).sum(),
    "importance_sampling": lambda p, q, a, w: -(ratio(p, q) * a).sum(),
    "ppo": lambda p, q, a, w: -torch.min(ratio(p, q) * a, ratio(p, q).clamp(LOW, HIGH) * a).sum(),
    "cispo": lambda p, q, a, w: -(ratio(p, q).clamp(LOW, HIGH).detach() * p * a).sum(),
    "dro": lambda p, q, a, w: -(p * a - 0.5 * BETA * (p - q) ** 2).sum(),
}


def drawn(dtype: torch.dtype, *kinds: str) -> tuple[Tensor, Tensor, TokenInputs]:
    """Log-probabilities, weights and inputs; the kinds take turns."""
    generator = torch.Generator().manual_seed(5)
    p = -3 * torch.rand(T, generator=generator, dtype=dtype)
    q = p + 0.5 * torch.randn(T, generator=generator, dtype=dtype)
    a = torch.randn(T, generator=generator, dtype=dtype)
    w = torch.rand(T, generator=generator, dtype=dtype)
    w[::7], a[::5] = 0, 0
    kind = torch.tensor([KINDS[name] for name in kinds] * T, dtype=torch.int8)[:T]
    low = torch.full_like(p, LOW)
    low[kind == KINDS["dro"]] = BETA
    return p, w, TokenInputs(kind, q, a, low, torch.full_like(p, HIGH))


@pytest.mark.parametrize("loss", DOCUMENTED)
def test_loss_and_slope_are_those_of_the_documentation(loss: str) -> None:
    p, w, inputs = drawn(torch.float64, loss)
    p.requires_grad_(True)
    expected = DOCUMENTED[loss](p, inputs.sampled_T, inputs.advantage_T, w)
    (slope,) = torch.autograd.grad(expected, p)
    found = token_losses(p.detach(), w, inputs, {KINDS[loss]})
    torch.testing.assert_close(found.loss_T.sum(), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.slope_T, slope, rtol=1e-12, atol=1e-12)


def test_each_row_has_its_own_loss_and_the_bits_it_has_alone() -> None:
    names = list(DOCUMENTED)
    p, w, inputs = drawn(torch.float32, *names)
    together = token_losses(p, w, inputs, KINDS.values())
    for kind in KINDS.values():
        mine = inputs.kind_T == kind
        own = TokenInputs(*(value[mine] for value in inputs))
        alone = token_losses(p[mine], w[mine], own, {kind})
        assert torch.equal(together.loss_T[mine], alone.loss_T)
        assert torch.equal(together.slope_T[mine], alone.slope_T)


def test_cross_entropy_beside_others_keeps_its_weights_to_the_bit() -> None:
    p, w, inputs = drawn(torch.float32, "cross_entropy", "ppo")
    found = row_weights(-p, w, inputs, {KINDS["ppo"]})
    mine = inputs.kind_T == KINDS["cross_entropy"]
    assert torch.equal(found[mine], w[mine])
    assert not torch.equal(found[~mine], w[~mine])


def test_ratio_that_overflows_stays_in_its_row() -> None:
    p, w, inputs = drawn(torch.float32, "importance_sampling", "cross_entropy")
    inputs.sampled_T[0] = -1e4
    found = token_losses(p, w, inputs, {1})
    assert not found.loss_T[0].isfinite()
    assert found.loss_T[1:].isfinite().all()
    assert found.slope_T[1:].isfinite().all()
