"""One line of a job's JSONL file, checked: what it may hold, and what of it chat templates get.

Every API reads its lines here. A key that is not understood is an error: training would pass over
what it says. Whether a chat template writes what it gets is judged beside it, in `chats`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tlora_megatron.config.reader import nearest

RowKind = Literal["completion", "messages", "text"]
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""Closed, because a chat template may pass over a misspelt role without a word."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates look for the reasoning before an answer."""

_KEYS: dict[RowKind, tuple[str, ...]] = {
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
}
_OPTIONAL = ("tools", "chat_template_kwargs", "parallel_tool_calls")
"""Keys that a chat may have beside its messages; the last one is OpenAI's, and changes no text."""
_OF_ANSWERS = ("weight", "tool_calls", *REASONING)
_MESSAGE_KEYS = ("role", "content", "name", "tool_call_id", *_OF_ANSWERS)
_PREFERENCES = ("chosen", "rejected", "preferred_output", "non_preferred_output")
_NOT_TRAINED = {
    **dict.fromkeys(_PREFERENCES, "preference data, which needs the job's section preference"),
    "label": "unpaired preference data, which is not trained here",
    "functions": "an older form of tools",
    "function_call": "an older form of tool_calls",
}


class Row(NamedTuple):
    """One checked line of a JSONL file."""

    kind: RowKind
    fields: dict[str, Any]
    """The messages of a chat are as `read_messages` returns them."""
    where: str
    """Job, file and line number, for errors."""


def parse_row(line: bytes, where: str) -> Row:
    """Reads and checks one line that is not empty.

    Args:
        line: its bytes.
        where: file and line number, for errors.

    Raises:
        ValueError: if it is none of the three formats, or holds what would not be trained.
    """
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"a line must be UTF-8, got {error}: {where}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a line must be JSON, got {error}: {where}") from error
    try:
        kind = _kind(fields)
        if kind == "messages":
            fields = _read_chat(fields)
        else:
            for key in _KEYS[kind]:
                _check_text(fields[key], key)
    except ValueError as error:
        raise ValueError(f"{error}: {where}") from error
    return Row(kind, fields, where)


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as chat templates get them: what is null is left out, arguments are objects.

    Only `weight`, which says whether an answer is learnt, is none of a template's business.

    Raises:
        ValueError: naming the message that cannot be used.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages must be a non-empty list, got {messages!r:.80}")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def is_learnt(message: Mapping[str, Any]) -> bool:
    """True for an answer of weight 1, which is also that of an answer without a weight."""
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def _kind(fields: Any) -> RowKind:
    if not isinstance(fields, dict):
        raise ValueError(f"a line must be a JSON object, got {type(fields).__name__}")
    for key, what in _NOT_TRAINED.items():
        if fields.get(key) is not None:
            raise ValueError(f"{key} must be left out: it is {what}")
    kinds = [kind for kind, keys in _KEYS.items() if any(key in fields for key in keys)]
    if len(kinds) != 1 or any(key not in fields for key in _KEYS[kinds[0]]):
        raise ValueError(
            f"a line must hold prompt and completion, or messages, or text, "
            f"got the keys {sorted(fields)}"
        )
    more = _OPTIONAL if kinds[0] == "messages" else ()
    _check_keys(fields, (*_KEYS[kinds[0]], *more), "a line")
    return kinds[0]


def _check_keys(fields: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    """Refuses a key that is not known, unless it holds nothing."""
    for key in fields:
        if key not in known and fields[key] is not None:
            hint = nearest(key, known) or "remove it: training would pass over it"
            raise ValueError(f"{name}'s keys must be {', '.join(known)}, got {key!r:.80}; {hint}")


def _read_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {"messages": read_messages(fields["messages"])}
    if not any(map(is_learnt, chat["messages"])):
        raise ValueError("a chat must have an answer of weight 1 (role assistant), got none")
    tools, variables = fields.get("tools"), fields.get("chat_template_kwargs")
    if tools:
        chat["tools"] = _checked_tools(tools)
    if variables:
        if not isinstance(variables, dict):
            raise ValueError(f"chat_template_kwargs must be an object, got {variables!r:.80}")
        _check_plain(variables, "chat_template_kwargs")
        chat["chat_template_kwargs"] = variables
    return chat


def _checked_tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise ValueError(f"tools must be a list, got {tools!r:.80}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"tools[{index}] must be an object whose function has a name, got {tool!r:.80}"
            )
    _check_plain(tools, "tools")
    return tools


def _read_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f"{name} must hold role and content, got {message!r:.80}")
    found = {key: value for key, value in message.items() if value is not None}
    if found.get("role") not in ROLES:
        got = f"{message['role']!r:.80}"
        raise ValueError(f"{name}.role must be one of {', '.join(ROLES)}, got {got}")
    _check_keys(found, _MESSAGE_KEYS, name)
    for key in _OF_ANSWERS:
        if key in found and found["role"] != "assistant":
            raise ValueError(f"{name}.{key} must be of role assistant, got {found['role']}")
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = _read_calls(calls, f"{name}.tool_calls")
        found.setdefault("content", "")
    elif "content" not in message:
        raise ValueError(f"{name} must hold role and content, got {message!r:.80}")
    for key in ("content", "name", "tool_call_id", *REASONING):
        if key in found or key == "content":
            _check_text(found.get(key), f"{name}.{key}")
    weight = found.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{name}.weight must be 0 or 1, got {weight!r:.80}")
    return found


def _read_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"{name} must be a list, got {calls!r:.80}")
    return [_read_call(call, f"{name}[{index}]") for index, call in enumerate(calls)]


def _read_call(call: Any, name: str) -> dict[str, Any]:
    """A call whose arguments are an object: OpenAI has them as text, which templates quote."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{name} must be an object whose function has a name, got {call!r:.80}")
    _check_keys(call, ("id", "type", "function"), name)
    _check_keys(function, ("name", "arguments"), f"{name}.function")
    given = arguments = function.get("arguments")
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        rule = "be JSON of an object" if isinstance(given, str) else "be an object"
        raise ValueError(f"{name}.function.arguments must {rule}, got {given!r:.80}")
    found = {**call, "function": {"name": function["name"], "arguments": arguments}}
    _check_plain(found, name)
    return found


def _check_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r:.80}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be Unicode text, got {error}") from error


def _check_plain(value: Any, name: str) -> None:
    """Refuses text in a nested value that no tokenizer could read."""
    try:
        _check_text(json.dumps(value, ensure_ascii=False), name)
    except RecursionError as error:
        raise ValueError(f"{name} must be less deep, got {error}") from error
