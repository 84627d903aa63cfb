"""Tokens of a prompt, as training makes them of a row up to where the answer begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tlora_megatron.training.data.tokenize import ROLES, appends_eos


def encode_prompt(tokenizer: Any, text: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the tokens of a text, or of messages whose next one is the assistant's.

    Raises:
        ValueError: if it is neither, or the chat template is missing or refuses the messages.
    """
    if isinstance(text, str):
        ids = list(tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])
        return ids[:-1] if appends_eos(tokenizer) else ids
    _check_messages(text)
    if not tokenizer.chat_template:
        raise ValueError(
            "messages must be for a base whose tokenizer has a chat template, and this one has "
            "none; send a text to completions"
        )
    messages = [{key: value for key, value in m.items() if value is not None} for m in text]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program and may raise anything
        raise ValueError(
            f"messages must suit the chat template, got {type(error).__name__}: {error}"
        ) from error
    ids = tokenizer(rendered, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(ids["input_ids"])


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list that is not empty, got {messages!r:.80}")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} must be an object, got {message!r:.80}")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"{where}.role must be one of {', '.join(ROLES)}, got {message.get('role')!r:.80}"
            )
        if not isinstance(message.get("content"), str):
            raise ValueError(
                f"{where}.content must be a text, got {type(message.get('content')).__name__}"
            )
