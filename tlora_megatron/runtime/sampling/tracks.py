"""A sampler's notes of each request and sequence that grows, and the choice of next tokens.

A sequence draws one number a token from a generator of its own, so who is sampled beside it does
not matter to it. The number is looked up in the sequence's own cumulative distribution.

Shapes: n sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.ops.host_copy import Array, to_device
from tlora_megatron.runtime.sampling.values import (
    AdapterKey,
    Piece,
    Prompt,
    SamplingParams,
    TextStream,
    TokenLogprob,
    TopLogprobs,
)


def draws_of(seed: int, sample: int) -> random.Random:
    """The generator of one sequence's numbers."""
    # A text is hashed by sha512: neighbouring seeds have nothing in common.
    return random.Random(f"{seed}/{sample}")


def log_probabilities(logits_nV: Tensor) -> Tensor:
    """Natural logarithms of the probabilities at temperature 1, fp32."""
    return torch.log_softmax(logits_nV, dim=-1)


def choose(
    logits_nV: Tensor, params: Sequence[SamplingParams], draws: Sequence[random.Random]
) -> Tensor:
    """Chooses the next token of each sequence, int64 `[n]`; of equal ones, the smallest.

    Temperature comes first, then the `top_k` likeliest, then the fewest of these that hold `top_p`.
    """
    chosen_n = logits_nV.argmax(dim=-1)
    drawn = [i for i, one in enumerate(params) if one.temperature > 0]
    if drawn:
        rows = to_device(torch.tensor(drawn), logits_nV.device)
        # Rows that are not finite are refused, and must not end in an index of nothing before.
        chosen_n[rows] = _draw(
            logits_nV[rows].nan_to_num(),
            [params[i] for i in drawn],
            [draws[i].random() for i in drawn],
        )
    return chosen_n


def _draw(logits_nV: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    def column(values: Sequence[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float64), logits_nV.device)[:, None]

    size = logits_nV.shape[1]
    # The likeliest token has 0, whatever it is divided by: nothing becomes infinite.
    below_nV = logits_nV.double() - logits_nV.double().amax(dim=-1, keepdim=True)
    scaled_nV = below_nV / column([one.temperature for one in params])
    p_nV, order_nV = scaled_nV.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(size, device=logits_nV.device)
    p_nV = p_nV * (rank_V < column([one.top_k or size for one in params]))
    before_nV = p_nV.cumsum(dim=-1) - p_nV
    kept_n1 = p_nV.sum(dim=-1, keepdim=True) * column([one.top_p for one in params])
    p_nV = p_nV * ((before_nV < kept_n1) | (rank_V == 0))
    sums_nV = p_nV.cumsum(dim=-1)
    wanted_n1 = column(numbers) * sums_nV[:, -1:]
    places_n1 = torch.searchsorted(sums_nV, wanted_n1, right=True)
    # A number just below 1 may round up to the sum, behind which nothing is left.
    last_n1 = (p_nV > 0).sum(dim=-1, keepdim=True) - 1
    return order_nV.gather(1, torch.minimum(places_n1, last_n1))[:, 0]


def top_of(logprobs_V: Tensor, count: int) -> TopLogprobs:
    """The likeliest tokens of one row."""
    values, tokens = logprobs_V.topk(min(count, len(logprobs_V)))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return tuple(TokenLogprob(token, logprob) for token, logprob in pairs)


Tell = Callable[[Piece | ValueError], None]
"""Is told a request's pieces, or the sentence that refuses it."""


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One prompt, from when it is asked until all its sequences have ended."""

    prompt: Prompt
    number: int
    """of the prompt in its call"""
    tell: Tell
    most_new: int
    """tokens of each sequence"""
    seed: int
    key: AdapterKey | None = None
    is_cancelled: bool = False
    rows: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """of the cache: the prompt's, and behind them those of each sequence"""
    num_live: int = 0
    """sequences that have not ended"""
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top: list[TopLogprobs | None] = field(default_factory=lambda: [None])
    targets: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of the cache that it needs; the last token of a sequence is never computed."""
        return len(self.prompt.tokens) + self.prompt.num_samples * self.own_rows

    @property
    def own_rows(self) -> int:
        """Rows of each sequence, behind the prompt's."""
        return max(0, self.most_new - 1)

    @property
    def wants_scores(self) -> bool:
        """True if the prompt's own tokens are to be scored."""
        prompt = self.prompt
        wanted = prompt.prompt_logprobs or prompt.top_prompt_logprobs > 0 or self.most_new == 0
        return wanted or bool(prompt.targets)

    @property
    def num_ends(self) -> int:
        """Pieces that end something: its sequences, or its scores where it wants no more."""
        return self.prompt.num_samples if self.most_new else 1

    def ends(self, piece: Piece) -> bool:
        """True if a piece is one of these."""
        return piece.stop_reason is not None or (piece.scores is not None and not self.most_new)


@dataclass(kw_only=True, slots=True, eq=False)
class Track:
    """A sequence that grows: a prompt that is read, or a sample."""

    request: Request
    tokens: list[int]
    """all of them"""
    rows: Array
    """of the cache, token by token"""
    cached: int = 0
    """tokens that the cache holds"""
    sample: int | None = None
    """None = the prompt"""
    draws: random.Random | None = None
    text: TextStream | None = None

    @property
    def num_new(self) -> int:
        """Tokens that were generated."""
        return len(self.tokens) - len(self.request.prompt.tokens)


def penalise(logits_nV: Tensor, tracks: Sequence[Track]) -> Tensor:
    """Logits less the penalties of the tokens that each sequence has generated."""
    found_nV = logits_nV
    for row, track in enumerate(tracks):
        params = track.request.prompt.params
        if track.num_new and (params.presence_penalty or params.frequency_penalty):
            counts = Counter(track.tokens[-track.num_new :])
            times = torch.tensor(list(counts.values()), dtype=torch.float32).to(logits_nV.device)
            found_nV = logits_nV.clone() if found_nV is logits_nV else found_nV
            found_nV[row, list(counts)] -= (
                params.presence_penalty + params.frequency_penalty * times
            )
    return found_nV
