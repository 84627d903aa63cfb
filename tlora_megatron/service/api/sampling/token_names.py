"""Log-probabilities as OpenAI's clients read them: tokens by their texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tlora_megatron.runtime.sampling.values import TopLogprobs
from tlora_megatron.service.sampling.sampler import Sampler

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

    async def for_completion(self, scored: Scored, offset: int) -> dict[str, Any]:
        """The field `logprobs` of a choice of `/v1/completions`.

        Args:
            offset: of the first token in the text of the choice.
        """
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
