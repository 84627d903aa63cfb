"""Cross-entropy whose gradient takes the place of the logits, losses of single tokens, their sums.

Semantics, for a row of logits x over the whole vocabulary and its label y, in fp32:

    loss = log(sum_v exp(x_v - max x)) - (x_y - max x)
    gradient_v = exp(x_v - logsumexp x) - [v = y], rounded to the dtype of the logits

The logits are read in their own dtype and overwritten with the gradient, so no fp32 copy of them
ever exists. Columns from `valid` on only fill the vocabulary up: they count as minus infinity.

A row of the output layer gives a token's log-probability p. Its loss is a function of p and of
numbers that came with the token. The backward pass uses its derivative as the token's weight,
because the gradient of a row's logits is that of p, scaled. So every loss here is one scaling of
what the vocabulary head has computed already (`layers.vocabulary_head`).

With r = exp(p - q), q the log-probability under which the token was sampled, and A its advantage:

    cross_entropy         -w p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)
    cispo                 -clip(r) p A, where clip(r) counts as a constant
    dro                   -(p A - beta / 2 (p - q)^2)

Shapes: n rows, V columns of this rank's part of the vocabulary, T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.ops.lora.kernel_choice import runs_triton


def cross_entropy_(
    logits_nV: torch.Tensor, labels_n: torch.Tensor, valid: int, *, gradient: bool
) -> torch.Tensor:
    """Returns every row's loss, fp32 `[n]`, and may write its gradient over the logits.

    Args:
        logits_nV: contiguous, the whole vocabulary.
        labels_n: int64; a row whose label is no column has a meaningless loss.
        valid: columns that are tokens.
        gradient: of each row's own loss; without it the logits stay as they are.
    """
    if gradient and runs_triton(logits_nV):
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.frozen.cross_entropy_triton import launch_statistics

        parts_3n = launch_statistics(logits_nV, labels_n, valid, gradient=True)
        return merge_statistics(parts_3n[None])[0]
    losses_n, lse_n = merge_statistics(row_statistics(logits_nV, labels_n, valid)[None])
    if gradient:
        write_gradient_(logits_nV, labels_n, lse_n, valid)
    return losses_n


def row_statistics(logits_nV: torch.Tensor, labels_n: torch.Tensor, valid: int) -> torch.Tensor:
    """Returns maximum, sum of exponentials below it, and the label's logit, fp32 `[3, n]`.

    They are of this rank's part of the vocabulary: the logit is 0 where the label is elsewhere.
    """
    if runs_triton(logits_nV):
        from tlora_megatron.ops.frozen.cross_entropy_triton import launch_statistics

        return launch_statistics(logits_nV, labels_n, valid, gradient=False)
    logits_nV = logits_nV[:, :valid].float()
    if valid == 0:
        zeros_n = logits_nV.new_zeros(len(labels_n))
        return torch.stack([zeros_n - torch.inf, zeros_n, zeros_n])
    largest_n = logits_nV.amax(dim=1)
    sum_n = (logits_nV - largest_n[:, None]).exp().sum(dim=1)
    here_n = (labels_n >= 0) & (labels_n < valid)
    index_n1 = torch.where(here_n, labels_n, 0)[:, None]
    target_n = torch.where(here_n, logits_nV.gather(1, index_n1)[:, 0], 0.0)
    return torch.stack([largest_n, sum_n, target_n])


def merge_statistics(parts_r3n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and logsumexps, fp32 `[n]`, from the statistics of all parts of the vocabulary."""
    largest_n = parts_r3n[:, 0].amax(dim=0)
    sums_rn = parts_r3n[:, 1] * (parts_r3n[:, 0] - largest_n).exp()
    log_n = sums_rn.sum(dim=0).log()
    return log_n - (parts_r3n[:, 2].sum(dim=0) - largest_n), log_n + largest_n


def write_gradient_(
    logits_nV: torch.Tensor, labels_n: torch.Tensor, lse_n: torch.Tensor, valid: int
) -> None:
    """Overwrites logits with the gradients of their rows' losses."""
    if runs_triton(logits_nV):
        from tlora_megatron.ops.frozen.cross_entropy_triton import launch_gradient

        launch_gradient(logits_nV, labels_n, lse_n, valid)
        return
    columns_V = torch.arange(valid, device=logits_nV.device)
    grad_nV = (logits_nV[:, :valid].float() - lse_n[:, None]).exp()
    grad_nV -= (columns_V == labels_n[:, None]).float()
    logits_nV[:, :valid] = grad_nV
    logits_nV[:, valid:] = 0


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


def row_weights(
    nll_T: Tensor, weights_T: Tensor, inputs: TokenInputs | None, kinds: Collection[int]
) -> Tensor:
    """Weights by which `-log p` of rows, as the head returns it, has their losses' gradients.

    Rows of cross entropy keep theirs to the bit.

    Args:
        inputs, kinds: see `token_losses`.
    """
    return finite(-token_losses(-nll_T, weights_T, inputs, kinds).slope_T)


def finite(weights: Tensor) -> Tensor:
    """Zero for what is not finite: a loss that overflows is told, and makes no NaN in a GEMM."""
    return torch.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)


def segment_sums(values_T: Tensor, lengths_G: Tensor, *, exact: bool = False) -> Tensor:
    """Sums of consecutive runs, fp32 `[G]`, in a fixed order; a NaN stays in its own run.

    Args:
        exact: on GPUs too the order must not depend on the row at which a run begins. torch's loads
            four aligned values at once where a run is long.
    """
    values_T = values_T.float()
    if exact and values_T.is_cuda:
        from tlora_megatron.ops.frozen.cross_entropy_triton import launch_segment_sums

        return launch_segment_sums(values_T.contiguous(), lengths_G.cumsum(0))
    return torch.segment_reduce(values_T, "sum", lengths=lengths_G, initial=0, unsafe=True)
