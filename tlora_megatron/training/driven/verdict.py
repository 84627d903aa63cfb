"""Judges a request by the log-probabilities of its tokens: its loss, or why it is refused."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tlora_megatron.ops.frozen.losses import KINDS, TokenInputs, token_losses
from tlora_megatron.training.driven.requests import Request
from tlora_megatron.training.driven.state import loss_inputs


class Verdict(NamedTuple):
    """The outcome of a request."""

    loss: float
    """Sum over its tokens, fp64."""
    error: str | None


def judge(request: Request, logprobs: np.ndarray) -> Verdict:
    """Computes the loss of a request once more, from its answer: the same on every rank.

    Args:
        logprobs: of its tokens, fp32.
    """
    kind = KINDS[request.loss_fn]
    logprob_T = torch.from_numpy(logprobs)
    weights = request.arrays.get("weights")
    weights_T = torch.ones_like(logprob_T)
    if weights is not None:
        weights_T = torch.from_numpy(np.asarray(weights, np.float32))
    inputs = None
    if kind != KINDS["cross_entropy"]:
        kind_T = torch.full_like(logprob_T, kind, dtype=torch.int8)
        inputs = TokenInputs(kind_T, *torch.from_numpy(loss_inputs(request)))
    losses = token_losses(logprob_T, weights_T, inputs, {kind})
    for what, values_T in (
        ("log-probability", logprob_T),
        ("loss", losses.loss_T),
        ("slope of the loss", losses.slope_T),
    ):
        wrong = (~values_T.isfinite()).nonzero()
        if len(wrong):
            token = int(wrong[0])
            where = f"got {float(values_T[token])} at token {token}"
            error = f"the {what} must be finite, {where}; the request has changed nothing"
            return Verdict(float("nan"), error)
    return Verdict(float(losses.loss_T.double().sum()), None)
