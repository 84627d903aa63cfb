"""Lines of pairs of answers, one of them preferred, as two rows each: the chosen one first.

TRL's forms, with texts or messages: `{"prompt", "chosen", "rejected"}`, or without a prompt, which
then is what both sides begin with; and OpenAI's `{"input", "preferred_output",
"non_preferred_output"}`. Of messages only those behind the prompt are learnt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tlora_megatron.config.reader import nearest
from tlora_megatron.training.data.rows import Row, parse_row

_SIDES = ("chosen", "rejected")
_KEYS = ("prompt", *_SIDES, "tools", "chat_template_kwargs")
_OPENAI = {"preferred_output": "chosen", "non_preferred_output": "rejected"}


def parse_pair(line: Any, where: str) -> tuple[Row, Row]:
    """Reads and checks one line that is not empty.

    Args:
        line: its bytes, or what they hold.
        where: file and line number, for errors.

    Raises:
        ValueError: if it is no pair, or a side of it cannot be used.
    """
    try:
        fields = json.loads(line.decode("utf-8")) if isinstance(line, bytes) else line
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a line must be JSON in UTF-8, got {error}: {where}") from error
    try:
        pair = _pair(fields)
        prompt, chosen, rejected = _split(pair)
    except ValueError as error:
        raise ValueError(f"{error}: {where}") from error
    chosen_row, rejected_row = (
        parse_row(_side(pair, prompt, side), f"{where} ({name})")
        for name, side in zip(_SIDES, (chosen, rejected), strict=True)
    )
    return chosen_row, rejected_row


def is_pair(line: bytes) -> bool:
    """True if a line is meant to be a pair, as far as its keys say."""
    if not any(f'"{key}"'.encode() in line for key in (*_SIDES, *_OPENAI)):
        return False
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and not fields.keys().isdisjoint((*_SIDES, *_OPENAI))


def _pair(fields: Any) -> dict[str, Any]:
    """The fields of a pair by TRL's names, those left out that are null."""
    if not isinstance(fields, dict):
        raise ValueError(f"a line must be a JSON object, got {type(fields).__name__}")
    found = {key: value for key, value in fields.items() if value is not None}
    if isinstance(found.get("input"), dict) and not found.keys() & {"prompt", *_SIDES}:
        asked = {key: value for key, value in found.pop("input").items() if value is not None}
        asked.pop("parallel_tool_calls", None)  # changes no text
        found = {_OPENAI.get(key, key): value for key, value in found.items()}
        found |= {"prompt" if key == "messages" else key: value for key, value in asked.items()}
    if "label" in found:
        raise ValueError(
            "label must be left out: it is unpaired preference data (KTO), which is not trained "
            "here: send pairs"
        )
    if not all(key in found for key in _SIDES):
        raise ValueError(
            "a line of a job with preference must hold prompt, chosen and rejected, or input, "
            f"preferred_output and non_preferred_output, got the keys {sorted(fields)}"
        )
    for key in found:
        if key not in _KEYS:
            hint = nearest(key, _KEYS) or "remove it: training would pass over it"
            raise ValueError(f"a pair's keys must be {', '.join(_KEYS)}, got {key!r:.80}; {hint}")
    return found


def _split(pair: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt and both answers, alike texts or lists of messages."""
    chosen, rejected = (pair[side] for side in _SIDES)
    kind = str if isinstance(chosen, str) else list
    for name in (*_SIDES, "prompt"):
        if not isinstance(pair.get(name, chosen), kind) or pair.get(name) == []:
            raise ValueError(
                "prompt, chosen and rejected must all be texts, or lists of messages that are not "
                f"empty, got {name} {pair.get(name)!r:.80}"
            )
    if chosen == rejected:
        raise ValueError("chosen and rejected must differ, got the same")
    if "prompt" in pair:
        return pair["prompt"], chosen, rejected
    alike = zip(chosen, rejected, strict=False)
    common = next((i for i, (a, b) in enumerate(alike) if a != b), min(len(chosen), len(rejected)))
    if kind is str and chosen[:common].endswith(" "):
        common -= 1  # most tokenizers join a space to the word behind it, as TRL knows
    return chosen[:common], chosen[common:], rejected[common:]


def _side(pair: Mapping[str, Any], prompt: Any, answer: Any) -> dict[str, Any]:
    """One side as a row of supervised data."""
    if isinstance(answer, str):
        return {"prompt": prompt, "completion": answer}
    asked = [
        {**message, "weight": 0}
        if isinstance(message, dict) and message.get("role") == "assistant"
        else message
        for message in prompt
    ]
    return {
        "messages": [*asked, *answer],
        **{key: pair[key] for key in ("tools", "chat_template_kwargs") if key in pair},
    }
