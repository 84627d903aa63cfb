"""Losses of single tokens over their log-probabilities, beside which a row knows no other.

A row of the output layer gives a token's log-probability p. Its loss is a function of p and of
numbers that came with the token; its derivative is all that the backward pass needs of it, because
the gradient of a row's logits is that of p, scaled. So every loss here is one scaling of what the
vocabulary head has computed already (`layers.vocabulary_head`).

With r = exp(p - q), q the log-probability under which the token was sampled, and A its advantage:

    cross_entropy         -w p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)
    cispo                 -clip(r) p A, where clip(r) counts as a constant
    dro                   -(p A - beta / 2 (p - q)^2)

Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

CROSS_ENTROPY = 0
KINDS = {
    "cross_entropy": CROSS_ENTROPY,
    "importance_sampling": 1,
    "ppo": 2,
    "cispo": 3,
    "dro": 4,
}
"""Number of each loss in `TokenInputs.kind_T`."""


class TokenInputs(NamedTuple):
    """Values that came with the tokens of a micro-batch, one for every row."""

    kind_T: Tensor
    """Number of the row's loss, int8."""
    sampled_T: Tensor
    """Log-probability under which the token was sampled."""
    advantage_T: Tensor
    low_T: Tensor
    """Lower end of the clipped ratio; beta of `dro`."""
    high_T: Tensor
    """Upper end of the clipped ratio."""


class TokenLosses(NamedTuple):
    """Losses of rows and their derivatives by the log-probability, `[T]`."""

    loss_T: Tensor
    slope_T: Tensor


TokenLoss = Callable[[Tensor, TokenInputs], TokenLosses]
"""A loss; it may return anything in rows of other kinds."""


def importance_sampling(logprob_T: Tensor, inputs: TokenInputs) -> TokenLosses:
    """REINFORCE with the ratio to the policy that sampled."""
    loss_T = -(logprob_T - inputs.sampled_T).exp() * inputs.advantage_T
    return TokenLosses(loss_T, loss_T)


def ppo(logprob_T: Tensor, inputs: TokenInputs) -> TokenLosses:
    """The clipped surrogate: no slope where clipping makes the objective smaller."""
    ratio_T = (logprob_T - inputs.sampled_T).exp()
    free_T = ratio_T * inputs.advantage_T
    clipped_T = torch.clamp(ratio_T, inputs.low_T, inputs.high_T) * inputs.advantage_T
    slope_T = torch.where(free_T <= clipped_T, -free_T, 0.0)
    return TokenLosses(-torch.minimum(free_T, clipped_T), slope_T)


def cispo(logprob_T: Tensor, inputs: TokenInputs) -> TokenLosses:
    """REINFORCE whose weight is the clipped ratio: every token keeps a slope."""
    ratio_T = (logprob_T - inputs.sampled_T).exp()
    slope_T = -torch.clamp(ratio_T, inputs.low_T, inputs.high_T) * inputs.advantage_T
    return TokenLosses(slope_T * logprob_T, slope_T)


def dro(logprob_T: Tensor, inputs: TokenInputs) -> TokenLosses:
    """Advantage-weighted likelihood, with a parabola around the policy that sampled."""
    away_T = logprob_T - inputs.sampled_T
    beta_T = inputs.low_T
    loss_T = 0.5 * beta_T * away_T.square() - logprob_T * inputs.advantage_T
    return TokenLosses(loss_T, beta_T * away_T - inputs.advantage_T)


LOSSES: dict[int, TokenLoss] = {
    KINDS["importance_sampling"]: importance_sampling,
    KINDS["ppo"]: ppo,
    KINDS["cispo"]: cispo,
    KINDS["dro"]: dro,
}
"""All but cross entropy, which is its weight."""


def token_losses(
    logprob_T: Tensor, weights_T: Tensor, inputs: TokenInputs | None, kinds: Collection[int]
) -> TokenLosses:
    """Losses and slopes of all rows, each of its own kind.

    Args:
        weights_T: of the rows of cross entropy.
        kinds: numbers of the losses that some row has; None of the inputs is read without.
    """
    loss_T, slope_T = -logprob_T * weights_T, -weights_T
    for kind in sorted(set(kinds) - {CROSS_ENTROPY}):
        assert inputs is not None, "losses beside cross entropy have inputs"
        mine_T, own = inputs.kind_T == kind, LOSSES[kind](logprob_T, inputs)
        loss_T = torch.where(mine_T, own.loss_T, loss_T)
        slope_T = torch.where(mine_T, own.slope_T, slope_T)
    return TokenLosses(loss_T, slope_T)


class _Scaled(torch.autograd.Function):
    """Losses of rows from what the head returns; backward hands the head each row's weight."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        nll_T: Tensor,
        weights_T: Tensor,
        inputs: TokenInputs | None,
        kinds: Collection[int],
    ) -> Tensor:
        loss_T, slope_T = token_losses(-nll_T, weights_T, inputs, kinds)
        # A ratio that overflows makes a loss that its client is told of, and no NaN in a GEMM.
        ctx.save_for_backward(torch.nan_to_num(-slope_T, nan=0.0, posinf=0.0, neginf=0.0))
        return loss_T

    @staticmethod
    def backward(ctx, dloss_T: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        (weight_T,) = ctx.saved_tensors
        return dloss_T * weight_T, None, None, None


def scaled_losses(
    nll_T: Tensor, weights_T: Tensor, inputs: TokenInputs | None, kinds: Collection[int]
) -> Tensor:
    """Losses of rows from the head's, `-log p`, with their gradients.

    A row of cross entropy has the bits of `nll_T * weights_T`, and so has its gradient.

    Args:
        inputs, kinds: see `token_losses`.
    """
    loss_T: Tensor = _Scaled.apply(nll_T, weights_T, inputs, kinds)
    return loss_T
