"""Calls of tools in answers, as a base's chat template writes them.

The template is asked to write a call that is known. What it writes around the name and the
arguments is what an answer must have around its own: then it is a call, else a text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tlora_megatron.service.api.gate import ApiError
from tlora_megatron.service.sampling.sampler import Sampler

_NAME, _KEY, _VALUE = "tlora_name", "tlora_key", "tlora_value"
_CALL = {"name": _NAME, "arguments": {_KEY: _VALUE}}
_CHAT: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "tlora_question"},
    {
        **{"role": "assistant", "content": ""},
        "tool_calls": [{"id": "tloracall", "type": "function", "function": _CALL}],
    },
)


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads the answers of one base to a request with tools."""

    sampler: Sampler
    base: str
    names: Collection[str]
    """Of the tools."""
    opening: str
    """Stands before a call's name."""
    between: str
    """Stands between name and arguments."""
    tail: str
    """Stands behind these, with all that follows when the turn is over."""

    @classmethod
    async def learn(
        cls, sampler: Sampler, base: str, tools: Sequence[Mapping[str, Any]]
    ) -> CallReader:
        """Reads the form of calls off a base's template; `ApiError` if it writes them otherwise."""
        texts = [
            await sampler.decode(base, await sampler.encode(base, messages, tools=tools))
            for messages in (_CHAT[:1], _CHAT)
        ]
        same = takewhile(lambda both: both[0] == both[1], zip(*texts, strict=False))
        opening, _, rest = texts[1][len(list(same)) :].partition(_NAME)
        start = rest.rfind("{", 0, max(0, rest.find(_KEY)))
        arguments, end = _object(rest[start:])
        if arguments != _CALL["arguments"] or not opening.strip() or not start:
            rule = "be left out: the base's chat template writes no call as a name and JSON"
            raise ApiError(400, f"tools must {rule}", param="tools", code="unsupported_parameter")
        names = {tool["function"]["name"] for tool in tools}
        return cls(sampler, base, names, opening.lstrip(), rest[:start], rest[start + end :])

    async def read(self, tokens: Sequence[int]) -> tuple[str, list[dict[str, str]]] | None:
        """The text before the calls, and name and arguments of each; None if it is a text alone."""
        text = await self.sampler.decode(self.base, tokens)
        content, found, rest = text.partition(self.opening)
        calls: list[dict[str, str]] = []
        while found:
            name, _, rest = rest.partition(self.between)
            arguments, end = _object(rest)
            after, found, following = rest[end:].partition(self.opening)
            is_call = name in self.names and arguments is not None
            if not is_call or not self.tail.startswith(after.rstrip()):
                return None
            calls.append({"name": name, "arguments": rest[:end]})
            rest = following
        return (content.strip(), calls) if calls else None


def _object(text: str) -> tuple[dict[str, Any] | None, int]:
    """The object of JSON at the beginning of a text, and where it ends; None if there is none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    return (value, end) if isinstance(value, dict) else (None, 0)
