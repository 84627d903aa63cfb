"""Losses of clients in which a token's slope depends on more than its own log-probability.

A request with one of them runs twice: without gradients, and then as cross entropy in which minus a
token's slope, found here from the log-probabilities, is its weight.

With p and q the probabilities of training and sampling, and A the advantage of a token:

    gspo               -min(s A, clip(s) A), s = exp(mean of log p/q over the tokens of the mask);
                       the slope is that of a token's own log p, scaled by s (GSPO-token,
                       arXiv:2507.18071, as Tinker documents it)
    stable_reinforce   -A (log p - sum over h of c_h log p_h), c_h = q_h - r p_h a constant: the
                       score is centred under the sampler (arXiv:2609.20807, equation 14)

Of `stable_reinforce` h are the tokens whose q was recorded, the sampled one first, and r p stands
for q in all others: r = (1 - sum q_h) / (1 - sum p_h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from tlora_megatron.ops.frozen.losses import TokenLosses
from tlora_megatron.training.driven_requests import UNKNOWN_LOGPROB, Request

_LEAST_TAIL = 1e-6
"""Probability that all tokens together have at least whose q is not known."""
_Pair = tuple[np.ndarray, np.ndarray]


def _gspo(request: Request, rows: slice, logprob_RN: np.ndarray) -> _Pair:
    arrays, config = request.arrays, request.loss_config()
    advantage_N = arrays["advantages"][rows].astype(np.float64)
    in_ratio_N = arrays["sequence_ratio_mask"][rows] != 0
    away_N = (logprob_RN[0] - arrays["logprobs"][rows])[in_ratio_N]
    ratio = np.exp(away_N.mean()) if len(away_N) else 1.0
    free_N = ratio * advantage_N
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    kept_N = np.minimum(free_N, clipped * advantage_N)
    return -kept_N, np.where(free_N <= kept_N, -free_N, 0.0)


def _stable_reinforce(request: Request, rows: slice, logprob_RN: np.ndarray) -> _Pair:
    sampled_RN = request.arrays["logprobs"][rows].reshape(logprob_RN.shape).astype(np.float64)
    advantage_N = request.arrays["advantages"][rows].reshape(logprob_RN.shape)[0]
    is_known_RN = sampled_RN > UNKNOWN_LOGPROB
    p_RN, q_RN = (np.exp(one) * is_known_RN for one in (logprob_RN, sampled_RN))
    rest_N = np.maximum(0.0, 1 - q_RN.sum(0)) / np.maximum(_LEAST_TAIL, 1 - p_RN.sum(0))
    score_RN = rest_N * p_RN - q_RN
    score_RN[0] += 1
    slope_RN = -advantage_N * score_RN
    return slope_RN * logprob_RN, slope_RN


_LOSSES: dict[str, Callable[[Request, slice, np.ndarray], _Pair]] = {
    "gspo": _gspo,
    "stable_reinforce": _stable_reinforce,
}


def runs_twice(request: Request) -> bool:
    """True if a request has one of these losses."""
    return request.loss_fn in _LOSSES


def losses_of_data(request: Request, logprobs: np.ndarray) -> TokenLosses:
    """Losses of all tokens and their slopes, fp64 `[T]`.

    Args:
        logprobs: of the request's targets.
    """
    loss, wide = _LOSSES[request.loss_fn], logprobs.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # who asks looks for what is not finite
        found = [loss(request, rows, wide[rows].reshape(runs, -1)) for rows, runs in _data(request)]
    sides = zip(*found, strict=True)
    joined = (np.concatenate([part.ravel() for part in side]) for side in sides)
    return TokenLosses(*map(torch.from_numpy, joined))


def _data(request: Request) -> Iterator[tuple[slice, int]]:
    """The tokens of each datum, and how many sequences it runs as."""
    lengths, place, begin = request.arrays["lengths"], 0, 0
    for runs in request.runs:
        end = begin + int(lengths[place]) * runs
        yield slice(begin, end), runs
        place, begin = place + runs, end
