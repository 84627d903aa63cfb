"""One row of a job's data, checked: what it may hold, and what of it chat templates get.

Every API reads its rows here. A key that is not understood is an error: training would pass over
what it says. Whether a chat template writes what it gets is judged beside it, in `chats`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

from tlora_megatron.config.reader import nearest
from tlora_megatron.training.data.forms import from_alpaca, from_sharegpt, joined_parts

Learn = Literal["all", "last", "each"]
RowKind = Literal["completion", "messages", "text"]
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""Closed, because a chat template may pass over a misspelt role without a word."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates look for the reasoning before an answer."""

FORMS: dict[str, tuple[str, ...]] = {
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_OPTIONAL = ("tools", "chat_template_kwargs", "parallel_tool_calls")
"""Keys that a chat may have beside its messages; the last one is OpenAI's, and changes no text."""
_MORE = {
    "completion": _OPTIONAL,
    "messages": _OPTIONAL,
    "sharegpt": ("system", *_OPTIONAL),
    "alpaca": ("input", "system"),
}
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
    """One checked row of a file."""

    kind: RowKind
    fields: dict[str, Any]
    """The messages of a chat are as `read_messages` returns them."""
    where: str
    """Job, file and line number, for errors."""


def parse_row(line: Any, where: str) -> Row:
    """Reads and checks one line that is not empty.

    Args:
        line: its bytes, or what they hold.
        where: file and line number, for errors.

    Raises:
        ValueError: if it is none of the formats, or holds what would not be trained.
    """
    try:
        fields = json.loads(line.decode("utf-8")) if isinstance(line, bytes) else line
    except UnicodeDecodeError as error:
        raise ValueError(f"a line must be UTF-8, got {error}: {where}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a line must be JSON, got {error}: {where}") from error
    try:
        form = _form(fields)
        if form == "text" or (form == "completion" and not isinstance(fields["prompt"], list)):
            for key in FORMS[form]:
                _check_text(fields[key], key)
            return Row("text" if form == "text" else "completion", fields, where)
        return Row("messages", _read_chat(form, fields), where)
    except ValueError as error:
        raise ValueError(f"{error}: {where}") from error


def read_messages(messages: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Messages as chat templates get them: what is null is left out, arguments are objects.

    Only `weight`, which says whether an answer is learnt, is none of a template's business.

    Raises:
        ValueError: naming the message that cannot be used.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{name} must be a non-empty list, got {messages!r:.80}")
    return [_read_message(message, f"{name}[{i}]") for i, message in enumerate(messages)]


def read_chat(
    messages: Sequence[Any],
    answer: Sequence[Any] | None = None,
    *,
    tools: Any = None,
    variables: Any = None,
    names: tuple[str, str] = ("messages", "completion"),
) -> dict[str, Any]:
    """A conversation as `tokenize_chats` takes it, checked.

    Args:
        messages: OpenAI's, as a line holds them.
        answer: messages that follow; then theirs alone are the answers that are learnt.
        tools: of the template; a list, or JSON of one.
        variables: `chat_template_kwargs`.
        names: of both, for errors.

    Raises:
        ValueError: naming what cannot be used, or if no answer is learnt.
    """
    found = read_messages(messages, names[0])
    if answer is not None:
        if found[-1]["role"] == "assistant":
            raise ValueError(f"{names[0]} must end with a message that is answered, got an answer")
        found = [_unlearnt(message) for message in found] + read_messages(answer, names[1])
    chat: dict[str, Any] = {"messages": found}
    if not any(map(is_learnt, found)):
        raise ValueError("a chat must have an answer of weight 1 (role assistant), got none")
    if tools:
        chat["tools"] = _checked_tools(tools)
    if variables:
        if not isinstance(variables, dict):
            raise ValueError(f"chat_template_kwargs must be an object, got {variables!r:.80}")
        _check_plain(variables, "chat_template_kwargs")
        chat["chat_template_kwargs"] = variables
    return chat


def learnt_parts(row: Row, learn: Learn) -> list[Row]:
    """The rows that are trained for one: itself, or of a chat its last answer or each on its own.

    What follows an answer is left out, so that a template writes it as when it is asked for it.
    """
    if row.kind != "messages" or learn == "all":
        return [row]
    messages = row.fields["messages"]
    ends = [index for index, message in enumerate(messages) if is_learnt(message)]
    return [
        row._replace(
            fields={**row.fields, "messages": [*map(_unlearnt, messages[:end]), messages[end]]}
        )
        for end in (ends if learn == "each" else ends[-1:])
    ]


def is_learnt(message: Mapping[str, Any]) -> bool:
    """True for an answer of weight 1, which is also that of an answer without a weight."""
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def keys_of(form: str) -> tuple[str, ...]:
    """The keys that a row of a form may have, those that it must have first."""
    return FORMS[form] + _MORE.get(form, ())


def _form(fields: Any) -> str:
    if not isinstance(fields, dict):
        raise ValueError(f"a line must be a JSON object, got {type(fields).__name__}")
    for key, what in _NOT_TRAINED.items():
        if fields.get(key) is not None:
            raise ValueError(f"{key} must be left out: it is {what}")
    forms = [form for form, keys in FORMS.items() if any(key in fields for key in keys)]
    if len(forms) != 1 or any(key not in fields for key in FORMS[forms[0]]):
        raise ValueError(
            f"a line must hold prompt and completion, or messages, or text, or conversations, or "
            f"instruction and output, got the keys {sorted(fields)}"
        )
    is_text = forms[0] == "completion" and not isinstance(fields["prompt"], list)
    _check_keys(fields, FORMS[forms[0]] if is_text else keys_of(forms[0]), "a line")
    return forms[0]


def _check_keys(fields: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    """Refuses a key that is not known, unless it holds nothing."""
    for key in fields:
        if key not in known and fields[key] is not None:
            hint = nearest(key, known) or "remove it: training would pass over it"
            raise ValueError(f"{name}'s keys must be {', '.join(known)}, got {key!r:.80}; {hint}")


def _read_chat(form: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    tools, variables = fields.get("tools"), fields.get("chat_template_kwargs")
    read = partial(read_chat, tools=tools, variables=variables)
    if form == "completion":
        names = ("prompt", "completion")
        return read(fields["prompt"], fields["completion"], names=names)
    if form == "messages":
        return read(fields["messages"])
    if form == "sharegpt":
        return read(from_sharegpt(fields))
    for key in ("instruction", "input", "output"):
        _check_text(fields.get(key) or "", key)
    return read(from_alpaca(fields))


def _unlearnt(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def _checked_tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str):  # as in tables, whose columns have one type
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
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
    if "content" in found:
        found["content"] = joined_parts(found["content"], f"{name}.content")
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
