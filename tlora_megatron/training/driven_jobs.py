"""A job whose batches and steps a client asks for: its state, and how its requests are judged.

A loss in which a token's slope depends on more than its own log-probability runs twice: without
gradients, and then as cross entropy in which minus a token's slope, found here from the
log-probabilities, is its weight. With p and q the probabilities of training and sampling, and A the
advantage of a token:

    gspo               -min(s A, clip(s) A), s = exp(mean of log p/q over the tokens of the mask);
                       the slope is that of a token's own log p, scaled by s (GSPO-token,
                       arXiv:2507.18071, as Tinker documents it)
    stable_reinforce   -A (log p - sum over h of c_h log p_h), c_h = q_h - r p_h a constant: the
                       score is centred under the sampler (arXiv:2609.20807, equation 14)

Of `stable_reinforce` h are the tokens whose q was recorded, the sampled one first, and r p stands
for q in all others: r = (1 - sum q_h) / (1 - sum p_h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.dropout import mix_ints
from tlora_megatron.ops.frozen.losses import (
    CROSS_ENTROPY,
    KINDS,
    TokenInputs,
    TokenLosses,
    token_losses,
)
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.driven_requests import UNKNOWN_LOGPROB, Request
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.packing import Item, MicroBatch
from tlora_megatron.training.packing.row_arrays import SentTokens

NO_DATA = JobData(train=(), eval=(), num_truncated=0, num_dropped=0)
"""The data of a job that gets its tokens from a client."""
_LEAST_TAIL = 1e-6
"""Probability that all tokens together have at least whose q is not known."""
_Pair = tuple[np.ndarray, np.ndarray]


class OpenPlan(BatchPlan):
    """The plan of a job that ends when its client says so: it knows no steps."""

    def __init__(self) -> None:
        super().__init__(num_sequences=1, batch_size=1, seed=0, max_steps=1)

    @property
    def num_steps(self) -> int:
        """0: nobody knows."""
        return 0


@dataclass(kw_only=True, slots=True)
class Running:
    """A request whose sequences run through the model."""

    number: int
    request: Request
    grad: Tensor | None
    """The job's gradient before it; None = it was zero."""


@dataclass(kw_only=True, slots=True)
class DrivenState(JobState):
    """Progress of a job that a client drives.

    `step` counts what has changed its weights: optimizer steps, and states that were loaded.
    """

    done: int = 0
    """Number of the last request that was carried out."""
    known: int = 0
    """Number of the last request of which all ranks know."""
    running: Running | None = None
    to_score: list[Item] | None = None
    """The rest of a request that runs without gradients, maybe before it runs with them."""
    has_grad: bool = False
    """The gradient holds requests that no step has used."""
    counted: int = 0
    """Number of the last request that its weights and moments count; those behind it are carried
    out again by whoever goes on from here."""
    saved_count: int = 0
    """The same of its last checkpoint."""
    loss: Tensor | None = None
    """None always: its requests have losses, not its steps."""
    loss_sum: float = 0.0
    """Sum of the losses of the requests that its gradient holds."""
    weight_sum: float = 0.0
    """Sum of the weights of their tokens; 1 each where the loss has no weights."""
    asked_tokens: tuple[int, int] = (0, 0)
    """Tokens of these, and how many have a weight."""
    saving: int = 0
    """Number of the request whose state is being taken; 0 = none."""
    has_left: bool = False

    @property
    def is_done(self) -> bool:
        """True once its client has left."""
        return self.has_left

    @property
    def is_at_end(self) -> bool:
        """True: nobody knows its next batch."""
        return True

    @property
    def is_idle(self) -> bool:
        return not self.queue

    @property
    def lr(self) -> float:
        """0: every step has its own."""
        return 0.0

    @property
    def dropout_key(self) -> int:
        """Key of the dropout masks of the request that runs."""
        return mix_ints(self.spec.seed, self.running.number if self.running else 0)

    def items_ahead(self) -> list[Item]:
        return self.queue

    def begin_batch(self, device: torch.device) -> None:
        """Does nothing: its client begins batches."""

    def begin(self, number: int, request: Request, device: torch.device) -> None:
        """Queues the sequences of a request."""
        grad, slab = None, self.adapter.slab
        if request.op == "forward_backward" and self.has_grad:
            slab.collect_grad()
            grad = slab.grad.clone()
        count = int(request.arrays["lengths"].astype(np.int64).sum())
        self.nll_T = torch.zeros(count, device=device)
        self.running = Running(number=number, request=request, grad=grad)
        items = items_of(request)
        if request.op == "forward" or runs_twice(request):
            self.to_score = items
        else:
            self.queue = items

    @property
    def has_run(self) -> bool:
        """True if all sequences of its request have run."""
        return self.running is not None and not self.queue and not self.to_score

    def runs_again(self, logprobs: np.ndarray) -> bool:
        """Queues a request with the slopes that its scores give; False if it needs none.

        Args:
            logprobs: of its tokens.
        """
        assert self.running is not None and self.nll_T is not None, "a request must run"  # noqa: PT018
        request, is_scored = self.running.request, self.to_score is not None
        if request.op == "forward" or not is_scored:
            return False
        slope_T = losses_of_data(request, logprobs).slope_T
        self.nll_T.zero_()  # another rank may run a token this time
        self.to_score, self.queue = None, items_of(request, -slope_T.float().numpy())
        return True

    def end(self, *, is_good: bool, loss: float) -> None:
        """Keeps the gradient of the request that has run, or makes it what it was before."""
        assert self.running is not None, "a request must run"
        request, slab = self.running.request, self.adapter.slab
        if request.op == "forward_backward" and not is_good:
            slab.zero_grad()
            if self.running.grad is not None:
                slab.grad.copy_(self.running.grad)
        elif request.op == "forward_backward":
            self.has_grad = True
            self.loss_sum += loss
            weights, (tokens, targets) = request.weights, self.asked_tokens
            self.weight_sum += float(np.abs(weights).sum(dtype=float))
            self.asked_tokens = tokens + len(weights), targets + int(np.count_nonzero(weights))
        number, self.running, self.to_score, self.nll_T = self.running.number, None, None, None
        self.finish(number)

    @property
    def mean_loss(self) -> float:
        """Loss of a token of weight 1, over the requests that the gradient holds."""
        return self.loss_sum / self.weight_sum if self.weight_sum else 0.0

    def finish(self, number: int) -> None:
        """Counts a request as carried out."""
        self.done = number
        if not self.has_grad:
            self.counted = number

    def moved(self, number: int, *, applied: bool) -> tuple[int, int]:
        """Counts a request that has used up or dropped the gradient.

        Returns:
            Tokens that the gradient held, and how many had a weight.
        """
        held, self.asked_tokens = self.asked_tokens, (0, 0)
        self.loss_sum = self.weight_sum = 0.0
        self.has_grad = False
        if applied:
            self.step += 1
            self.tokens += held[0]
            self.target_tokens += held[1]
        self.finish(number)
        return held

    def progress(self) -> dict[str, Any]:
        own = {"job": self.name, "requests": self.counted, "saved": self.saving}
        return {**JobState.progress(self), "journal": own}

    def restore(self, progress: dict[str, Any]) -> None:
        """Sets the values that a checkpoint kept; another job's begins with the first request."""
        JobState.restore(self, progress)
        own = progress.get("journal") or {}
        if own.get("job") == self.name:
            self.done = self.known = self.counted = self.saved_count = int(own["requests"])


def items_of(request: Request, weights: np.ndarray | None = None) -> list[Item]:
    """The sequences of a request as they are packed.

    Args:
        weights: of the tokens, instead of the request's own.
    """
    arrays, kind = request.arrays, KINDS.get(request.loss_fn, CROSS_ENTROPY)
    weights = request.weights if weights is None else weights
    inputs = None if kind == CROSS_ENTROPY else loss_inputs(request)
    items, begin = [], 0
    for index, length in enumerate(arrays["lengths"].tolist()):
        rows = slice(begin, begin + length)
        tokens = np.append(arrays["tokens"][rows], np.int32(0))
        sent = SentTokens(arrays["targets"][rows], weights[rows], kind)
        if inputs is not None:
            sent = sent._replace(inputs=inputs[:, rows])
        sequence = TokenSequence(tokens, np.ones(length + 1, bool))
        items.append(Item(sequence, index, begin, 0.0, sent))
        begin += length
    return items


def loss_inputs(request: Request) -> np.ndarray:
    """The fields of `TokenInputs` behind the first, fp32 `[4, T]`."""
    arrays, config = request.arrays, request.loss_config()
    low = arrays.get("clip_low_threshold", config.get("clip_low_threshold", config.get("beta", 0)))
    high = arrays.get("clip_high_threshold", config.get("clip_high_threshold", 0))
    rows = (arrays["logprobs"], arrays["advantages"], low, high)
    count = len(arrays["tokens"])
    return np.stack([np.broadcast_to(np.asarray(row, np.float32), (count,)) for row in rows])


def collect(jobs: Sequence[JobState], micro_batch: MicroBatch, nll_T: Tensor) -> None:
    """Keeps what rows of clients and of pairs report with their jobs, which are in slot order.

    Args:
        nll_T: negative log-probabilities of the rows that ran; anything in other jobs' rows.
    """
    nll_T = micro_batch.restore_order(nll_T)
    begin, found = 0, dict[int, tuple[list[np.ndarray], list[np.ndarray]]]()
    for piece in micro_batch.packed.view.pieces:
        rows, slot = np.arange(begin, begin + piece.length), piece.document.slot
        begin += piece.length
        if slot < len(jobs) and jobs[slot].nll_T is not None:  # the padding's is beyond
            here, there = found.setdefault(slot, ([], []))
            here.append(rows)
            there.append(rows - rows[0] + piece.document.first_token + piece.offset)
    for slot, places in found.items():
        here_R, there_R = (
            to_device(torch.from_numpy(np.concatenate(rows)), nll_T.device) for rows in places
        )
        jobs[slot].nll_T[there_R] = nll_T[here_R]  # type: ignore[index]


def gathered(states: Sequence[DrivenState]) -> list[np.ndarray]:
    """Log-probabilities of the tokens of each job's request, fp32 `[T]`; waits for the device.

    Collective over the world: one all-reduce. Every token ran on one rank that counts, so that
    nothing is rounded.
    """
    parts = [state.nll_T for state in states if state.nll_T is not None]
    assert len(parts) == len(states), "only requests that run have values"
    joined = torch.cat(parts)
    dist.all_reduce(joined)
    values = -joined.cpu().numpy()
    return np.split(values, np.cumsum([len(part) for part in parts])[:-1])


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
    logprob_T = torch.from_numpy(logprobs)
    if runs_twice(request):
        losses = losses_of_data(request, logprobs)
    else:
        kind, inputs = KINDS[request.loss_fn], None
        weights_T = torch.from_numpy(np.asarray(request.weights, np.float32))
        if kind != CROSS_ENTROPY:
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
