"""A sampler's notes of each request and of each sequence that grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tlora_megatron.runtime.sampling.adapter_key import AdapterKey
from tlora_megatron.runtime.sampling.choice import Draws
from tlora_megatron.runtime.sampling.text import TextStream
from tlora_megatron.runtime.sampling.values import Piece, Prompt, TopLogprobs

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
    rows: list[int] = field(default_factory=list)
    """of the cache: the prompt's"""
    num_live: int = 0
    """sequences that have not ended"""
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top: list[TopLogprobs | None] = field(default_factory=lambda: [None])

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
        return prompt.prompt_logprobs or prompt.top_prompt_logprobs > 0 or self.most_new == 0

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
    rows: list[int]
    """of the cache, token by token"""
    cached: int = 0
    """tokens that the cache holds"""
    sample: int | None = None
    """None = the prompt"""
    draws: Draws | None = None
    text: TextStream | None = None

    @property
    def num_new(self) -> int:
        """Tokens that were generated."""
        return len(self.tokens) - len(self.request.prompt.tokens)
