"""Losses of pairs of answers, one of them preferred: functions of their log-probabilities.

With c and r the sums of the log-probabilities of the chosen and of the rejected answer's n and m
tokens, and c0 and r0 the same under the reference:

    dpo     h = beta ((c - c0) - (r - r0))              arXiv 2305.18290, equation 7
    simpo   h = beta (c / n - r / m) - margin           arXiv 2405.14734, equation 6
    orpo    h = logit exp(c / n) - logit exp(r / m)     arXiv 2403.07691, equations 4 and 7

    loss = -(1 - s) log sigmoid(h) - s log sigmoid(-h), with s the label smoothing; orpo: times beta

A batch's loss is the mean of these, and a weight times the mean of `-log p` over the chosen tokens.
As of single tokens (`losses`), backward only needs each row's weight: minus the slope of its side.

Shapes: P pairs, G = 2P sides, chosen before rejected, R rows of their tokens, T rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tlora_megatron.ops.frozen.losses import finite, segment_sums

T = TypeVar("T", float, Tensor)

PAIR_KINDS = {"dpo": 0, "simpo": 1, "orpo": 2}


class PairTerms(NamedTuple, Generic[T]):
    """What the loss of a pair depends on beside log-probabilities: numbers, or fp64 `[P]`."""

    kind: T
    """Number of its loss."""
    beta: T
    smoothing: T
    margin: T
    reference_chosen: T
    """0 where the loss has no reference."""
    reference_rejected: T
    chosen_tokens: T
    rejected_tokens: T
    weight: T
    """1 / pairs of the whole batch."""
    sft: T
    """Of each chosen token's cross entropy in the batch's loss."""


class PairLosses(NamedTuple):
    """Losses and rewards of pairs, fp64."""

    loss_P: Tensor
    """The pair's part of the batch's loss."""
    slope_P2: Tensor
    """Its derivative by each side's log-probability."""
    reward_P2: Tensor


def pair_losses(logps_P2: Tensor, terms_KP: Tensor) -> PairLosses:
    """Losses of pairs.

    Args:
        logps_P2: sums over the tokens of each side, fp64.
        terms_KP: the fields of `PairTerms`, fp64.
    """
    terms = PairTerms[Tensor](*terms_KP)
    is_dpo_P, is_orpo_P = terms.kind == PAIR_KINDS["dpo"], terms.kind == PAIR_KINDS["orpo"]
    tokens_P2 = torch.stack([terms.chosen_tokens, terms.rejected_tokens], dim=1)
    scale_P2 = torch.where(is_dpo_P[:, None], 1.0, 1 / tokens_P2)
    reference_P2 = torch.stack([terms.reference_chosen, terms.reference_rejected], dim=1)
    x_P2 = (logps_P2 - reference_P2) * scale_P2
    one_less_P2 = -torch.expm1(x_P2)  # 1 - exp(x)
    score_P2 = torch.where(is_orpo_P[:, None], x_P2 - one_less_P2.log(), terms.beta[:, None] * x_P2)
    dscore_P2 = torch.where(is_orpo_P[:, None], 1 / one_less_P2, terms.beta[:, None])
    h_P = score_P2[:, 0] - score_P2[:, 1] - terms.margin
    factor_P = torch.where(is_orpo_P, terms.beta, 1.0) * terms.weight
    kept_P, swapped_P = 1 - terms.smoothing, terms.smoothing
    loss_P = -factor_P * (kept_P * logsigmoid(h_P) + swapped_P * logsigmoid(-h_P))
    dh_P = factor_P * (swapped_P * torch.sigmoid(h_P) - kept_P * torch.sigmoid(-h_P))
    slope_P2 = dh_P[:, None] * dscore_P2 * scale_P2
    sft_P = terms.sft
    return PairLosses(
        loss_P=loss_P - sft_P * logps_P2[:, 0],
        slope_P2=torch.stack([slope_P2[:, 0] - sft_P, -slope_P2[:, 1]], dim=1),
        reward_P2=terms.beta[:, None] * x_P2,
    )


class PairRows(NamedTuple):
    """Rows of a micro-batch that belong to pairs, on the device."""

    rows_R: Tensor
    """int64: rows with a target on this rank, side by side of each pair."""
    lengths_G: Tensor
    """int64: how many of them each side has."""
    terms_KP: Tensor
    """See `pair_losses`."""

    def weights(
        self, nll_T: Tensor, weights_T: Tensor, add: Callable[[Tensor], object] | None, exact: bool
    ) -> Tensor:
        """Returns the rows' weights, in which those of pairs follow from their own losses.

        Args:
            add: sums over the ranks that share the rows; None = this one has all.
            exact: see `segment_sums`.
        """
        sums_G = segment_sums(nll_T[self.rows_R], self.lengths_G, exact=exact)
        if add is not None:
            add(sums_G)
        slope_P2 = pair_losses(-sums_G.double().view(-1, 2), self.terms_KP).slope_P2
        weights_R = torch.repeat_interleave(
            finite(-slope_P2.flatten().float()), self.lengths_G, output_size=len(self.rows_R)
        )
        return weights_T.index_copy(0, self.rows_R, weights_R)
