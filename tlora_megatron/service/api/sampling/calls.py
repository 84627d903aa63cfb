"""Calls of tools in answers, as a chat template writes them.

The template is asked to write a call that is known. What it writes says in which form answers have
theirs: a text that is not of that form stays a text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from tlora_megatron.runtime.sampling.values import Sampled, overlap
from tlora_megatron.service.api.gate import ApiError
from tlora_megatron.service.sampling.sampler import Sampler

_NAME, _KEY, _VALUE = "tlora_name", "tlora_key", "tlora_value"
_ARGUMENTS = {_KEY: _VALUE}
_CHAT: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "tlora_question"},
    {
        **{"role": "assistant", "content": ""},
        "tool_calls": [
            # Mistral's templates take ids of nine characters alone.
            {
                "id": "tloracall",
                "type": "function",
                "function": {"name": _NAME, "arguments": _ARGUMENTS},
            }
        ],
    },
)
_THOUGHT = "</think>"
_PYTHON = "<|python_tag|>"
"""Llama 3.1 may write it before a call, and its template does not."""
_TO = "to=functions."
_FUNCTION = re.compile(r"(?:<function=)?([^>\n]+)>\s*(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<head>[^\n]{0,200}?)<\|message\|>(?P<body>.*?)"
    r"(?:<\|(?:end|call|return)\|>|$)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_PYTHONS = {"True": True, "False": False, "None": None}
"""How Qwen3.5's template writes values that are no texts."""


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """JSON of an object."""
    id: str = ""
    """Empty: the form has none."""


class Said(NamedTuple):
    """An answer that is not a text alone."""

    content: str
    calls: list[Call]
    reasoning: str = ""


ReadOne = Callable[[str], tuple[list[Call], str] | None]
"""Calls at the beginning of a text, and what stands behind them; None: there are none."""


class CallForm(ABC):
    """A form of answers."""

    @abstractmethod
    def read(self, text: str) -> Said | None:
        """What an answer, or the end of one, says; None: it is a text."""

    @abstractmethod
    def may_begin(self, text: str) -> bool:
        """True if a call could begin in a text, or where it ends."""


@dataclass(frozen=True, slots=True)
class MarkedCalls(CallForm):
    """Calls behind a mark, or where one can be read."""

    opening: str
    """The mark; empty: there is none."""
    tail: str
    """Stands behind a call, with all that follows when the turn is over."""
    read_one: ReadOne

    def read(self, text: str) -> Said | None:
        begin = self._begin(text)
        content, calls = text[:begin], list[Call]()
        while begin is not None:
            one = self.read_one(text[begin:].removeprefix(self.opening).lstrip())
            if one is None:
                return None
            calls += one[0]
            text = one[1]
            begin = self._begin(text)
            if not self.tail.startswith(text[:begin].replace(_PYTHON, "").strip("; \n")):
                return None
        return Said(content.rstrip().removesuffix(_PYTHON), calls) if calls else None

    def _begin(self, text: str) -> int | None:
        if self.opening:
            return text.find(self.opening) if self.opening in text else None
        places = (found.start() for found in re.finditer(r"[{\[]", text))
        return next((place for place in places if self.read_one(text[place:])), None)

    def may_begin(self, text: str) -> bool:
        if not self.opening:
            return any(mark in text for mark in ("{", "[", _PYTHON)) or text[-1:].isspace()
        is_there = self.opening in text or overlap(text, self.opening) > 0
        return is_there or text[-1:].isspace()


class HarmonyCalls(CallForm):
    """gpt-oss's: an answer consists of messages with channels, and of calls with a recipient."""

    def read(self, text: str) -> Said | None:
        parts: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
        calls, messages = [], [*_HARMONY.finditer(text)]
        if "".join(found[0] for found in messages) != text:
            return None
        for head, body in (found.group("head", "body") for found in messages):
            channel = _CHANNEL.search(head)
            if _TO in head:
                arguments, end = _decoded(body.strip())
                if not isinstance(arguments, dict) or body.strip()[end:]:
                    return None
                name = re.split(r"[\s<]", head.partition(_TO)[2], maxsplit=1)[0]
                calls.append(Call(name, body.strip()))
            elif channel is None or channel[1] not in parts:
                return None
            else:
                parts[channel[1]].append(body)
        analysis, *others = ("\n".join(bodies).strip() for bodies in parts.values())
        return Said("\n".join(filter(None, others)), calls, analysis) if messages else None

    def may_begin(self, text: str) -> bool:
        return True


def form_of(written: str, tools: Sequence[Mapping[str, Any]]) -> CallForm | None:
    """The form in which a template has written the known call; None: none that is known here."""
    head, _, rest = written.partition(_NAME)
    if head.endswith(_TO) and "<|message|>" in rest:
        return HarmonyCalls()
    head = head.rpartition(_THOUGHT)[2]
    if head.endswith("<function="):
        functions = [tool["function"] for tool in tools]
        schemas = {each["name"]: _properties(each.get("parameters")) for each in functions}
        opening = head.removesuffix("<function=").strip() or "<function="
        tail = rest.partition("</function>")[2].strip()
        return MarkedCalls(opening, tail, partial(_read_tagged, schemas))
    for start in (found.start() for found in [*re.finditer("{", head)][::-1]):
        value, end = _decoded((text := head + _NAME + rest)[start:])
        keys = {json.dumps(part): key for key, part in value.items()} if value else {}
        name, arguments = (keys.get(json.dumps(part)) for part in (_NAME, _ARGUMENTS))
        if name and arguments:
            opening, tail = head[:start].strip(), text[start + end :].strip()
            if opening.endswith("["):
                opening, tail = opening[:-1].rstrip(), tail.removeprefix("]").strip()
            return MarkedCalls(opening, tail, partial(_read_json, (name, arguments)))
    start = rest.find("{")
    value, end = _decoded(rest[max(start, 0) :])
    if value != _ARGUMENTS or not head.strip():
        return None
    tail = rest[start + end :].strip()
    return MarkedCalls(head.strip(), tail, partial(_read_named, rest[:start].strip()))


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads the answers to a request with tools."""

    sampler: Sampler
    base: str
    names: frozenset[str]
    """Of the tools."""
    form: CallForm
    most: int | None
    """Calls of an answer; more are left out. None: all."""

    @classmethod
    async def learn(
        cls,
        sampler: Sampler,
        base: str,
        chat: Mapping[str, Any],
        template: str | None,
        most: int | None,
    ) -> CallReader:
        """Reads the form of calls off a template; `ApiError` if it is not known here."""
        asked, written = [
            await sampler.decode(
                base, await sampler.encode(base, {**chat, "messages": messages}, template)
            )
            for messages in (_CHAT[:1], _CHAT)
        ]
        same = takewhile(lambda both: both[0] == both[1], zip(asked, written, strict=False))
        form = form_of(written[len(list(same)) :], chat["tools"])
        if form is None:
            rule = "be left out: calls as the model's chat template writes them are not read here"
            raise ApiError(400, f"tools must {rule}", param="tools", code="unsupported_parameter")
        names = frozenset(tool["function"]["name"] for tool in chat["tools"])
        return cls(sampler, base, names, form, most)

    async def read(self, sequence: Sampled) -> Said | None:
        """What an answer, or the end of one, says; None: it is a text."""
        said = await self._read(sequence.tokens)
        if said is None and sequence.stop_reason == "stop":  # by a token that the template has not
            said = await self._read(sequence.tokens[:-1])
        return said

    async def _read(self, tokens: Sequence[int]) -> Said | None:
        if not tokens:
            return None
        said = self.form.read(await self.sampler.decode(self.base, tokens))
        if said is None or any(call.name not in self.names for call in said.calls):
            return None
        return said._replace(calls=said.calls[: self.most])


def _read_json(keys: tuple[str, str], text: str) -> tuple[list[Call], str] | None:
    """Calls as objects with a name and arguments, one or a list of them."""
    value, end = _decoded(text)
    calls = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict):
            return None
        name, arguments = map(each.get, keys)
        if isinstance(arguments, str):
            arguments, _ = _decoded(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append(Call(name, json.dumps(arguments, ensure_ascii=False), str(each.get("id", ""))))
    return (calls, text[end:]) if calls else None


def _read_named(between: str, text: str) -> tuple[list[Call], str] | None:
    """A call as a name, what stands between, and an object of arguments."""
    start = text.find("{")
    name = text[: max(start, 0)].rstrip()
    arguments, end = _decoded(text[start:])
    if not name.endswith(between) or not isinstance(arguments, dict):
        return None
    call = Call(name.removesuffix(between).strip(), text[start : start + end])
    return [call], text[start + end :]


def _read_tagged(
    schemas: Mapping[str, Mapping[str, Any]], text: str
) -> tuple[list[Call], str] | None:
    """A call as Qwen3.5 has it, each parameter between tags."""
    found = _FUNCTION.match(text)
    if found is None or _PARAMETER.sub("", found[2]).strip():
        return None
    name = found[1].strip()
    pairs = ((key.strip(), value) for key, value in _PARAMETER.findall(found[2]))
    schema = schemas.get(name, {})
    arguments = {key: _typed(value, schema.get(key)) for key, value in pairs}
    return [Call(name, json.dumps(arguments, ensure_ascii=False))], text[found.end() :]


def _typed(text: str, schema: Any) -> Any:
    """A parameter's value: a text, unless its tool says that it is none."""
    if not isinstance(schema, Mapping):
        return text
    several = [part.get("type") for part in schema.get("anyOf") or schema.get("oneOf") or ()]
    types = schema.get("type") or several
    is_null = text in ("null", "None") and "null" in types
    if not types or ("string" in types and not is_null):
        return text
    if text in _PYTHONS:
        return _PYTHONS[text]
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def _properties(parameters: Any) -> Mapping[str, Any]:
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _decoded(text: str) -> tuple[Any, int]:
    """The object or list of JSON at the beginning of a text, and where it ends; None: there is
    none."""
    with suppress(ValueError, RecursionError):
        value, end = json.JSONDecoder().raw_decode(text)
        if isinstance(value, dict | list):
            return value, end
    return None, 0
