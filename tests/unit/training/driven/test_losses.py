"""Losses that look at all of a datum, and their gradients, against their definitions in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.test_driven import centred, gspo
from tlora_megatron.training.driven_jobs import losses_of_data
from tlora_megatron.training.driven_requests import UNKNOWN_LOGPROB, Request

VOCABULARY, TOKENS = 7, 33


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of training, log-probabilities of sampling, and advantages, some of them 0."""
    generator = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, VOCABULARY, TOKENS, generator=generator, dtype=torch.float64)
    advantages = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    advantages[::5] = 0
    return logits.requires_grad_(True), (logits + 0.5 * other).log_softmax(0), advantages


def gradient_of(request: Request, told: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The gradient by the logits that the slopes of a request make."""
    slope = losses_of_data(request, told.detach().ravel().numpy()).slope_T
    (found,) = torch.autograd.grad((told.ravel() * slope).sum(), logits, retain_graph=True)
    return found


@pytest.mark.parametrize("known", [1, 3, VOCABULARY])
def test_the_score_iscentred_under_the_sampler(known: int) -> None:
    """By a definition with autograd; with all tokens known the sampler's mean is exact."""
    logits, sampler, advantages = drawn()
    own = logits.log_softmax(0)[:known]
    sampled = sampler.detach()[:known]
    repeated = advantages.expand(known, -1)
    request = Request(
        op="forward_backward",
        params={"loss_fn": "stable_reinforce", "runs": [known]},
        arrays={"lengths": np.array([TOKENS] * known), "logprobs": sampled.ravel().numpy(),
                "advantages": repeated.reshape(-1).numpy()},
    )  # fmt: skip
    expected = centred(own, repeated, sampled)
    if known == VOCABULARY:
        mean = (sampler.exp().detach() * logits.log_softmax(0)).sum(0)
        expected = -(advantages * (own[0] - mean)).sum()
    else:
        loss = losses_of_data(request, own.detach().ravel().numpy()).loss_T.sum()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    (wanted,) = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(gradient_of(request, own, logits), wanted, rtol=1e-9, atol=1e-9)


def test_where_training_is_the_sampler_and_cells_are_unknown_it_is_reinforce() -> None:
    logits, _, advantages = drawn()
    own = logits.log_softmax(0)[:2]
    sampled = own.detach().clone()
    sampled[1] = UNKNOWN_LOGPROB
    arrays = {"lengths": np.array([TOKENS] * 2), "logprobs": sampled.ravel().numpy(),
              "advantages": advantages.repeat(2).numpy()}  # fmt: skip
    params = {"loss_fn": "stable_reinforce", "runs": [2]}
    request = Request(op="forward_backward", params=params, arrays=arrays)
    (wanted,) = torch.autograd.grad(-(advantages * own[0]).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient_of(request, own, logits), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1e-3, -1e-3])
def test_sequences_have_one_ratio_each(shift: float) -> None:
    """Below, within and above the clips."""
    logits, _, advantages = drawn()
    own = logits.log_softmax(0)[0]
    sampled, mask = own.detach() + shift, (torch.arange(TOKENS) % 3 > 0).double()
    lengths = [20, TOKENS - 20]
    arrays = {"lengths": np.array(lengths), "logprobs": sampled.numpy(),
              "advantages": advantages.numpy(), "sequence_ratio_mask": mask.numpy()}  # fmt: skip
    request = Request(op="forward_backward", params={"loss_fn": "gspo"}, arrays=arrays)
    parts = (x.split(lengths) for x in (own, advantages, own - sampled, mask))
    expected = sum(gspo(*one) for one in zip(*parts, strict=True))
    (wanted,) = torch.autograd.grad(expected, logits, retain_graph=True)
    found = losses_of_data(request, own.detach().numpy()).loss_T.sum()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient_of(request, own, logits), wanted, rtol=1e-9, atol=1e-9)
