"""Calls of tools in answers, as a base's chat template writes them.

The template is asked to write a call that is known. What it writes around the name and the
arguments is what an answer must have around its own: then it is a call, else a text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from tlora_megatron.service.api.gate import ApiError
from tlora_megatron.service.sampling.sampler import Sampler

_NAME, _ARGUMENTS = "tlora_name", {"tlora_key": "tlora_value"}
_CALL = {"name": _NAME, "arguments": _ARGUMENTS}
_ASKED: Mapping[str, Any] = {"role": "user", "content": "tlora_question"}
_ANSWER: Mapping[str, Any] = {
    **{"role": "assistant", "content": ""},
    "tool_calls": [{"id": "tloracall", "type": "function", "function": _CALL}],
}


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """JSON of an object, as it was generated."""


class Turn(NamedTuple):
    """An answer in parts."""

    content: str
    """What stands before the calls."""
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around a call: before its name, between name and arguments, and behind these."""

    opening: str
    between: str
    tail: str
    """With all that follows when the turn is over."""

    @classmethod
    async def learn(
        cls, sampler: Sampler, base: str, tools: Sequence[Mapping[str, Any]]
    ) -> CallForm:
        """Reads them off a base's template; raises `ApiError` if it writes calls otherwise."""
        texts = [
            await sampler.decode(base, await sampler.encode(base, messages, tools=tools))
            for messages in ([_ASKED], [_ASKED, _ANSWER])
        ]
        same = takewhile(lambda both: both[0] == both[1], zip(*texts, strict=False))
        turn = texts[1][len(list(same)) :]
        opening, found, rest = turn.partition(_NAME)
        start = rest.rfind("{", 0, rest.find(next(iter(_ARGUMENTS))))
        arguments, end = _object(rest[start:]) if found and start >= 0 else ({}, 0)
        if arguments != _ARGUMENTS or not opening.strip():
            rule = "be left out: the base's chat template writes no call as a name and JSON"
            raise ApiError(400, f"tools must {rule}", param="tools", code="unsupported_parameter")
        return cls(opening.lstrip(), rest[:start], rest[start + end :])

    def read(self, text: str, names: Collection[str]) -> Turn | None:
        """The calls of tools of these names in an answer; None if it is a text alone."""
        content, found, rest = text.partition(self.opening)
        calls: list[Call] = []
        while found:
            name, _, rest = rest.partition(self.between)
            arguments, end = _object(rest)
            after, found, following = rest[end:].partition(self.opening)
            if name not in names or arguments is None or not self.tail.startswith(after.rstrip()):
                return None
            calls.append(Call(name, rest[:end]))
            rest = following
        return Turn(content.strip(), tuple(calls)) if calls else None


def _object(text: str) -> tuple[dict[str, Any] | None, int]:
    """The object of JSON at the beginning of a text, and where it ends; None if there is none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    return (value, end) if isinstance(value, dict) else (None, 0)
