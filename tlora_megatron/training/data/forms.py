"""Rows as other tools keep conversations, as OpenAI's messages: ShareGPT's and Alpaca's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""`from` of a ShareGPT turn -> role, where they differ."""


def from_sharegpt(fields: Mapping[str, Any]) -> list[Any]:
    """Messages of a ShareGPT row; turns that have a `role` already are messages.

    Raises:
        ValueError: if it holds no list.
    """
    turns = fields["conversations"]
    if not isinstance(turns, list):
        raise ValueError(f"conversations must be a list, got {turns!r:.80}")
    return _told(fields) + [_message(turn) for turn in turns]


def from_alpaca(fields: Mapping[str, Any]) -> list[Any]:
    """Messages of an Alpaca row of texts: its input is a line of its own below the instruction."""
    question = "\n".join(filter(None, (fields["instruction"], fields.get("input"))))
    answer = {"role": "assistant", "content": fields["output"]}
    return [*_told(fields), {"role": "user", "content": question}, answer]


def joined_parts(content: Any, name: str) -> Any:
    """A message's content with parts of type text as one text; others are refused."""
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(f"{name}[{index}] must be a part of type text, got {part!r:.80}")
    return "".join(part["text"] for part in content)


def _told(fields: Mapping[str, Any]) -> list[Any]:
    system = fields.get("system")
    return [{"role": "system", "content": system}] if system else []


def _message(turn: Any) -> Any:
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    more = {key: value for key, value in turn.items() if key not in ("from", "value")}
    role = SHAREGPT_ROLES.get(str(turn["from"]), turn["from"])
    return {**more, "role": role, "content": turn.get("value")}
