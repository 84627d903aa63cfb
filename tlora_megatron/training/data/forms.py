"""Rows as other tools keep conversations, turned into OpenAI's: TRL's, ShareGPT's and Alpaca's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
"""`from` of a ShareGPT turn -> role."""


def from_sharegpt(fields: Mapping[str, Any]) -> list[Any]:
    """Messages of a ShareGPT row; turns that have a `role` already are messages.

    Raises:
        ValueError: naming the turn that has other keys, or another `from`.
    """
    turns = fields["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"conversations must be a non-empty list, got {turns!r:.80}")
    system = fields.get("system")
    asked = [{"role": "system", "content": system}] if system else []
    return asked + [_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]


def from_alpaca(fields: Mapping[str, Any]) -> list[Any]:
    """Messages of an Alpaca row: its input stands in a line of its own beneath the instruction."""
    system, more = fields.get("system"), fields.get("input")
    for key in ("instruction", "output", *(("input",) if more else ())):
        if not isinstance(fields[key], str):
            raise ValueError(f"{key} must be a string, got {fields[key]!r:.80}")
    asked = [{"role": "system", "content": system}] if system else []
    question = fields["instruction"] + (f"\n{more}" if more else "")
    answer = {"role": "assistant", "content": fields["output"]}
    return [*asked, {"role": "user", "content": question}, answer]


def joined_parts(content: Any, name: str) -> Any:
    """A message's content with parts of type text as one text; others are refused."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError(f"{name}[{index}] must be a part of type text, got {part!r:.80}")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{name}[{index}].text must be a string, got {part.get('text')!r:.80}")
        texts.append(part["text"])
    return "".join(texts)


def _turn(turn: Any, name: str) -> Any:
    if not isinstance(turn, Mapping) or "role" in turn:
        return turn
    extra = [key for key in turn if key not in ("from", "value") and turn[key] is not None]
    if extra or turn.get("from") not in SHAREGPT_ROLES:
        raise ValueError(
            f"{name} must hold value, and from as one of {', '.join(SHAREGPT_ROLES)}, "
            f"got {dict(turn)!r:.80}; write calls of tools as OpenAI's messages"
        )
    return {"role": SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")}
