"""Text of a sequence while it grows, the texts that end it, and a call's pieces put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tlora_megatron.runtime.sampling.values import Answer, Piece, Prompt, Sampled, Scores

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoders give it for the first bytes of a character."""
_TAIL = 8
"""Tokens that tell how a text ends: they hold four bytes, the longest character, and to spare."""


class Grown(NamedTuple):
    """The text that a token added, and the stop text that it completed."""

    text: str
    """that no further token can change or cut off"""
    stop: str | None
    """the stop text that the sequence now holds"""


class TextStream:
    """Decodes tokens as they come.

    A token's text may depend on the one before it (a space, the rest of a character), so tokens are
    decoded together with those of the piece before. Of a run of bytes that are no characters only
    the last tokens are decoded, until they end in a character: a text costs as much as it has
    tokens.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._begin, self._read, self._before = 0, 0, ""
        """Tokens from the first on are decoded together; the text up to the second is known."""
        self._held = ""
        """Known text that may be the beginning of a stop text."""

    def add(self, token: int) -> Grown:
        """Takes the next token."""
        self._tokens.append(token)
        text = self._finished()
        if text is None:
            if self._is_silent(token):
                self._tokens.pop()
            return Grown("", None)
        return self._pass_on(self._held + text)

    def end(self) -> Grown:
        """Takes the end of the sequence: nothing is held back any more."""
        now = self._decode(self._tokens[self._begin :])
        grown = self._pass_on(self._held + now[len(self._before) :])
        held, self._held = self._held, ""
        return Grown(grown.text + held, grown.stop)

    def _finished(self) -> str | None:
        """Takes the text behind what is known, if it ends in a whole character."""
        if len(self._tokens) - self._read > _TAIL:
            # All of them ended in the middle of a character, so what they begin with is no matter.
            tail = self._decode(self._tokens[-_TAIL:])
            if tail.endswith(_UNFINISHED):
                return None
        now = self._decode(self._tokens[self._begin :])
        if len(now) <= len(self._before) or now.endswith(_UNFINISHED):
            return None
        found = now[len(self._before) :]
        self._begin, self._read = self._read, len(self._tokens)
        self._before = self._decode(self._tokens[self._begin :])
        return found

    def _is_silent(self, token: int) -> bool:
        """True if decoders leave a token out; a lone space, which some cut off, comes twice."""
        return not self._decode([token, token])

    def _pass_on(self, text: str) -> Grown:
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, stop = min(found)
            self._held = ""
            return Grown(text[:at], stop)
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return Grown(text[: len(text) - kept], None)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def _overlap(text: str, stop: str) -> int:
    """The longest end of a text that is the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def gather(prompts: Sequence[Prompt], pieces: Iterable[Piece]) -> list[Answer]:
    """Returns one answer a prompt, in their order; all pieces of a call must be there."""
    scores: dict[int, Scores] = {}
    parts: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        if piece.scores is not None:
            scores[piece.prompt] = piece.scores
        else:
            parts.setdefault((piece.prompt, piece.sample), []).append(piece)
    return [
        _answer(number, prompt, scores.get(number), parts) for number, prompt in enumerate(prompts)
    ]


def _answer(
    number: int,
    prompt: Prompt,
    scores: Scores | None,
    parts: dict[tuple[int, int], list[Piece]],
) -> Answer:
    wanted = prompt.num_samples if prompt.params.max_tokens != 0 else 0
    top = scores.top if scores is not None and prompt.top_prompt_logprobs else None
    return Answer(
        sequences=tuple(_sampled(parts[number, sample]) for sample in range(wanted)),
        prompt_logprobs=scores.logprobs if scores is not None and prompt.prompt_logprobs else None,
        top_prompt_logprobs=top,
    )


def _sampled(pieces: Sequence[Piece]) -> Sampled:
    last = pieces[-1]
    assert last.stop_reason is not None, "a sequence has an end"
    return Sampled(
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=tuple(value for piece in pieces for value in piece.logprobs),
        stop_reason=last.stop_reason,
        text="".join(piece.text for piece in pieces),
        stopped_by=last.stopped_by,
        top_logprobs=tuple(top for piece in pieces for top in piece.top_logprobs),
    )
