"""The two forms of answers: a text's completion, and a turn of a chat; whole and streamed."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from string import ascii_letters, digits
from typing import Any

from tlora_megatron.runtime.sampling.values import (
    Answer,
    Piece,
    Prompt,
    Sampled,
    TopLogprobs,
    joined,
    merged,
)
from tlora_megatron.service.api.openai.models import Model
from tlora_megatron.service.api.sampling.calls import CallReader
from tlora_megatron.service.sampling.sampler import Sampler

_LETTERS, _ID_LENGTH = ascii_letters + digits, 9
"""Of ids of calls: Mistral's templates take no others."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
Scored = tuple[Sequence[int], Sequence[float | None], Sequence[TopLogprobs | None]]
"""Tokens, their log-probabilities, and the likeliest ones in their places; the last may be empty"""


class TokenNames:
    """Texts of tokens, each asked for once."""

    def __init__(self, sampler: Sampler, base: str) -> None:
        self._sampler = sampler
        self._base = base
        self._known: dict[int, str] = {}

    async def _learn(self, scored: Iterable[Scored]) -> None:
        wanted = {
            token
            for tokens, _, tops in scored
            for token in (*tokens, *(pair.token for top in tops for pair in top or ()))
        }
        unknown = sorted(wanted - self._known.keys())
        if unknown:
            texts = await self._sampler.token_texts(self._base, unknown)
            self._known.update(zip(unknown, texts, strict=True))

    async def text(self, tokens: Sequence[int]) -> str:
        """The texts of tokens one by one: special ones are among them."""
        await self._learn([(tokens, (), ())])
        return "".join(self._known[token] for token in tokens)

    async def for_completion(self, scored: Scored, offset: int) -> dict[str, Any]:
        """The field `logprobs` of a choice, in whose text they begin at an offset."""
        await self._learn([scored])
        tokens, logprobs, tops = scored
        names = [self._known[token] for token in tokens]
        offsets = [offset]
        for name in names:
            offsets.append(offsets[-1] + len(name))
        return {
            "tokens": names,
            "token_logprobs": list(logprobs),
            "top_logprobs": [self._by_name(top) for top in tops] or None,
            "text_offset": offsets[:-1],
        }

    async def for_chat(self, scored: Scored) -> dict[str, Any]:
        """The field `logprobs` of a choice of `/v1/chat/completions`."""
        await self._learn([scored])
        tokens, logprobs, tops = scored
        content = [
            {**self._entry(token, logprob), "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        for entry, top in zip(content, tops, strict=False):
            entry["top_logprobs"] = [self._entry(*pair) for pair in top or ()]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        name = self._known[token]
        is_whole = _UNFINISHED not in name
        return {
            "token": name,
            "logprob": logprob,
            "bytes": list(name.encode()) if is_whole else None,
        }

    def _by_name(self, top: TopLogprobs | None) -> Mapping[str, float] | None:
        if top is None:
            return None
        return {self._known[token]: logprob for token, logprob in reversed(top)}


class Form(ABC):
    """Makes bodies of what was sampled."""

    _prefix: str
    _objects: tuple[str, str]
    """whole and chunk"""

    def __init__(self, model: Model, names: TokenNames, wants_logprobs: bool) -> None:
        self._model = model
        self._names = names
        self._wants_logprobs = wants_logprobs
        self._id = f"{self._prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @abstractmethod
    async def whole(self, index: int, prompt: int, answer: Answer) -> dict[str, Any]:
        """The choice of this number for a sequence that has ended, of a prompt's number."""

    @abstractmethod
    async def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of a piece of a sequence."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a first chunk without a text; None: there is none."""
        return None

    def envelope(self, choices: Sequence[Mapping[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self._objects[is_chunk],
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.version,
            "choices": list(choices),
        }


class CompletionForm(Form):
    """`/v1/completions`; `echoes` are the prompts' texts, repeated before completions, or empty."""

    _prefix = "cmpl"
    _objects = ("text_completion", "text_completion")

    def __init__(
        self,
        model: Model,
        names: TokenNames,
        wants_logprobs: bool,
        prompts: Sequence[Prompt],
        echoes: Sequence[str],
    ) -> None:
        super().__init__(model, names, wants_logprobs)
        self._prompts = prompts
        self._echoes = echoes
        self._offsets: dict[int, int] = {}
        """Characters of a choice that were sent."""

    async def whole(self, index: int, prompt: int, answer: Answer) -> dict[str, Any]:
        echo = self._echoes[prompt] if self._echoes else ""
        sequence = answer.sequences[0] if answer.sequences else None
        logprobs = None
        if self._wants_logprobs:
            logprobs = await self._names.for_completion(self._scored(prompt, answer), 0)
        return {
            "index": index,
            "text": echo + (sequence.text if sequence is not None else ""),
            "logprobs": logprobs,
            "finish_reason": sequence.stop_reason if sequence is not None else "length",
        }

    def _scored(self, prompt: int, answer: Answer) -> Scored:
        """The tokens of a choice's text: those of its prompt, too, where it is repeated."""
        parts: list[Scored] = [(s.tokens, s.logprobs, s.top_logprobs) for s in answer.sequences]
        if self._echoes:
            scores, tops = answer.prompt_logprobs or (), answer.top_prompt_logprobs or ()
            parts.insert(0, (self._prompts[prompt].tokens, scores, tops))
        tokens, logprobs, tops_of_all = (
            tuple(chain(*column)) for column in zip(*parts, strict=True)
        )
        return tokens, logprobs, tops_of_all

    async def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs:
            scored = (piece.tokens, piece.logprobs, piece.top_logprobs)
            offset = self._offsets.get(index, 0)
            logprobs = await self._names.for_completion(scored, offset)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        return {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.stop_reason,
        }


class ChatForm(Form):
    """`/v1/chat/completions`; `calls` reads those of answers, where tools are offered."""

    _prefix = "chatcmpl"
    _objects = ("chat.completion", "chat.completion.chunk")

    def __init__(
        self, model: Model, names: TokenNames, wants_logprobs: bool, calls: CallReader | None
    ) -> None:
        super().__init__(model, names, wants_logprobs)
        self._calls = calls
        self._held: defaultdict[int, list[Piece]] = defaultdict(list)
        """Pieces of each choice that are told later, since a call may begin in them."""
        self._texts: defaultdict[int, str] = defaultdict(str)
        """Of their tokens."""

    async def whole(self, index: int, prompt: int, answer: Answer) -> dict[str, Any]:
        (sequence,) = answer.sequences
        told = await self._told(sequence, is_whole=True)
        message = {"role": "assistant", "refusal": None, **told}
        return await self._choice(index, {"message": message}, sequence, told)

    async def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        told: dict[str, Any] = {"content": piece.text}
        if self._calls is not None:
            held = self._held[index]
            held.append(piece)
            self._texts[index] += await self._names.text(piece.tokens)
            if piece.stop_reason is not None:
                told = await self._told(joined(held))
                for number, call in enumerate(told.get("tool_calls", ())):
                    call["index"] = number
            elif self._calls.form.may_begin(self._texts[index]):
                told = {}
            else:
                told = {"content": merged(held).text}
                held.clear()
                self._texts[index] = ""
        return await self._choice(index, {"delta": told}, piece, told)

    async def _told(self, sequence: Sampled, *, is_whole: bool = False) -> dict[str, Any]:
        """Content, reasoning and calls of a message, or of the end of one."""
        said = None if self._calls is None else await self._calls.read(sequence)
        if said is None:
            return {"content": sequence.text}
        content = said.content.strip() if is_whole else said.content
        told: dict[str, Any] = {"content": content or None}
        if said.reasoning:
            told["reasoning_content"] = said.reasoning
        if said.calls:
            told["tool_calls"] = [
                {
                    "id": call.id or "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH)),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        return told

    async def _choice(
        self, index: int, said: dict[str, Any], of: Piece | Sampled, told: Mapping[str, Any]
    ) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs:
            logprobs = await self._names.for_chat((of.tokens, of.logprobs, of.top_logprobs))
        reason = "tool_calls" if "tool_calls" in told else of.stop_reason
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
