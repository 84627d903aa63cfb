"""Chats as text: what a chat template writes, which of it is learnt, and that nothing is missing.

A template is a program and may pass over what it gets without a word. So each chat is written a
second time with a mark in the place of every text that it holds: a mark that is not there is an
error. Chats of one shape share that second text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from tlora_megatron.config.reader import nearest
from tlora_megatron.training.data.rows import REASONING, is_learnt

Span = tuple[int, int]
"""Half-open range of characters."""

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BLOCK_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}


class Written(NamedTuple):
    """A chat as text."""

    text: str
    spans: list[Span]
    """Of the answers that are learnt, or of all generation blocks."""


class _Marked(NamedTuple):
    """A chat with marks in the place of its texts, as text."""

    text: str
    blocks: list[Span]
    message_of: dict[str, int]
    """Mark -> index of its message."""


class ChatWriter:
    """Writes chats by a chat template; None: that of a tokenizer."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._given = template
        self._marked: dict[str, _Marked] = {}
        """Chats with marks -> their text."""

    def write(self, chat: Mapping[str, Any]) -> Written:
        """A conversation as text, and what of it is learnt.

        Args:
            chat: fields of a checked row.

        Raises:
            ValueError: if there is no template, or it fails, leaves out what the chat holds, or
                does not let answers be told apart.
        """
        text, blocks = self._render(chat)
        marked = self._check_shown(chat)
        if _GENERATION_BLOCK.search(self._template(chat)):
            return Written(text, _learnt_blocks(chat["messages"], blocks, marked))
        return Written(text, self._prefix_spans(chat, text))

    def ask(self, chat: Mapping[str, Any]) -> str:
        """A conversation as text, up to where the assistant's next answer begins.

        Raises:
            ValueError: as `write` does.
        """
        text, _ = self._render(chat, ask=True)
        self._check_shown(chat, ask=True)
        return text

    def _template(self, chat: Mapping[str, Any]) -> str:
        if self._given is not None:
            return self._given
        try:
            return str(self._tokenizer.get_chat_template(tools=chat.get("tools")))
        except ValueError as error:
            raise ValueError(
                "messages must come with a tokenizer that has a chat template, got none"
            ) from error

    def _render(self, chat: Mapping[str, Any], *, ask: bool = False) -> Written:
        """The text and the spans of generation blocks.

        `apply_chat_template(..., return_assistant_tokens_mask=True)` maps the same spans to tokens,
        but loses turns, or marks all that follows, where a span begins or ends with trimmed white
        space.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._template(chat)
        has_blocks = bool(_GENERATION_BLOCK.search(template))
        special = self._tokenizer.special_tokens_map
        variables = chat.get("chat_template_kwargs", {})
        _check_variables(variables, template, special)
        with _template_errors():
            (text,), spans = render_jinja_template(
                [[_without_weight(message) for message in chat["messages"]]],
                tools=chat.get("tools"),
                chat_template=template,
                return_assistant_tokens_mask=has_blocks,
                add_generation_prompt=ask,
                **special,
                **variables,
            )
        return Written(text, list(spans[0]) if has_blocks else [])

    def _check_shown(self, chat: Mapping[str, Any], *, ask: bool = False) -> _Marked:
        """Refuses a chat of which the template leaves something out."""
        marks = _Marks()
        copy = marks.put_into(chat, ask=ask)
        with _template_errors():
            key = json.dumps([ask, copy])
        if key not in self._marked:
            text, blocks = self._render(copy, ask=ask)
            for mark, path in marks.paths.items():
                if mark not in text:
                    _refuse_missing(path)
            self._marked[key] = _Marked(text, blocks, marks.message_of)
        return self._marked[key]

    def _prefix_spans(self, chat: Mapping[str, Any], text: str) -> list[Span]:
        """The answers that are learnt, each found between two shorter renderings.

        Turn k begins where the template asks for generation after the messages before it and ends
        where the rendering of the first k + 1 messages ends, so its end-of-turn token belongs to
        it.
        """
        messages = chat["messages"]
        spans = []
        for index, message in enumerate(messages):
            if not is_learnt(message):
                continue
            if index == 0:
                raise ValueError("messages[0] must not be an answer: nothing asks for it")
            asked, _ = self._render({**chat, "messages": messages[:index]}, ask=True)
            answered, _ = self._render({**chat, "messages": messages[: index + 1]})
            length = _turn_length(text, asked, answered, message["content"].strip())
            if length is None:
                raise ValueError(
                    f"the chat template must extend the messages before an assistant turn when it "
                    f"adds the turn, got another beginning at messages[{index}] (a template with "
                    f"generation blocks marks the turns itself; an answer of weight 0 is not "
                    f"looked for: data.learn: last or each has one answer at a time)"
                )
            spans.append((len(asked), len(asked) + length))
        return spans


class _Marks:
    """Puts marks into a chat: numbers of 12 digits of which none is part of two others."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        """Mark -> path of the text in whose place it is."""
        self.message_of: dict[str, int] = {}

    def put_into(self, chat: Mapping[str, Any], *, ask: bool) -> dict[str, Any]:
        """A copy of a chat with a mark for each content, name and reasoning, and for each call.

        A template may keep reasoning to itself that is not to be learnt.
        """
        messages = []
        for index, message in enumerate(chat["messages"]):
            before = set(self.paths)
            optional = REASONING if ask or not is_learnt(message) else ()
            messages.append(self._message(message, f"messages[{index}]", optional))
            self.message_of |= dict.fromkeys(self.paths.keys() - before, index)
        copy = {**chat, "messages": messages}
        if "tools" in chat:
            copy["tools"] = [self._tool(tool, i) for i, tool in enumerate(chat["tools"])]
        return copy

    def _new(self, path: str) -> str:
        mark = f"9{len(self.paths):011o}"  # no other 9
        self.paths[mark] = path
        return mark

    def _message(
        self, message: Mapping[str, Any], name: str, optional: Sequence[str]
    ) -> dict[str, Any]:
        found = _without_weight(message)
        for key in ("content", "name", *REASONING):
            # A tool's name and the ids are those of its call.
            if found.get(key, "").strip() and (key, found["role"]) != ("name", "tool"):
                found[key] = "-" if key in optional else self._new(f"{name}.{key}")
        if "tool_calls" in found:
            calls = enumerate(found["tool_calls"])
            found["tool_calls"] = [self._call(call, f"{name}.tool_calls[{i}]") for i, call in calls]
        return found

    def _call(self, call: Mapping[str, Any], name: str) -> dict[str, Any]:
        function = {"name": self._new(f"{name}.function.name"), "arguments": {}}
        if call["function"]["arguments"]:
            mark = self._new(f"{name}.function.arguments")
            function["arguments"] = {mark: mark}
        return {**call, "function": function}

    def _tool(self, tool: Mapping[str, Any], index: int) -> dict[str, Any]:
        name = self._new(f"tools[{index}].function.name")
        return {**tool, "function": {**tool["function"], "name": name}}


def _refuse_missing(path: str) -> None:
    remedy = "leave it out, or name a template that writes it (data.chat_template)"
    if path.endswith(REASONING):
        remedy = "leave it out, give that answer weight 0, or set data.learn: each"
    raise ValueError(
        f"{path} must be written by the chat template, and this one passes over it: {remedy}"
    )


def _check_variables(
    variables: Mapping[str, Any], template: str, special: Mapping[str, Any]
) -> None:
    if not variables:
        return
    known = sorted(_variables_of(template) - special.keys())
    for name in variables:
        if name not in known:
            hint = nearest(name, known) or f"it asks for {', '.join(known) or 'none'}"
            raise ValueError(
                f"chat_template_kwargs must be variables of the chat template, got {name!r:.80}; "
                f"{hint}"
            )


@lru_cache(maxsize=16)
def _variables_of(template: str) -> frozenset[str]:
    """Names that a template looks up and that a row may set."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    with _template_errors():
        parsed = environment.parse(_BLOCK_TAGS.sub("", template))
    return frozenset(meta.find_undeclared_variables(parsed) - _OWN_VARIABLES)


def _learnt_blocks(
    messages: Sequence[Mapping[str, Any]], blocks: list[Span], marked: _Marked
) -> list[Span]:
    """Those generation blocks that hold an answer of weight 1."""
    answers = {i for i, message in enumerate(messages) if message["role"] == "assistant"}
    if all(is_learnt(messages[index]) for index in answers):
        return blocks
    silent = answers - set(marked.message_of.values())
    weights = []
    for begin, end in marked.blocks:
        inside = marked.text[begin:end]
        found = {index for mark, index in marked.message_of.items() if mark in inside} & answers
        weights.append({is_learnt(messages[index]) for index in found or silent})
    if len(weights) != len(blocks) or any(len(each) != 1 for each in weights):
        raise ValueError(
            "weight 0 must come with a chat template whose every generation block holds one "
            "answer, got blocks that hold none or several"
        )
    return [block for block, each in zip(blocks, weights, strict=True) if each == {True}]


def _without_weight(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a program and may raise anything
        raise ValueError(
            f"messages must suit the chat template, got {type(error).__name__}: {error}"
        ) from error


def _turn_length(text: str, asked: str, answered: str, content: str) -> int | None:
    """Characters of the turn that starts after `asked` in `text`; None if that is not certain."""
    if not (text.startswith(asked) and answered.startswith(asked)):
        return None
    if text.startswith(answered):
        return len(answered) - len(asked)
    # Qwen3 writes an empty think block into the last turn only: look for content and end of turn.
    at = answered.find(content, len(asked)) if content else -1
    while at >= 0:
        if text.startswith(answered[at:], len(asked)):
            return len(answered) - at
        at = answered.find(content, at + 1)
    return None
