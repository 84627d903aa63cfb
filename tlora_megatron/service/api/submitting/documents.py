"""Reads documents that strangers wrote: small, flat enough, and with nothing that unfolds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.config.source import mistake_words, parse_document

MOST_JSON_BYTES = 4 << 20
MOST_YAML_BYTES = 256 << 10
"""PyYAML reads about 100 KB a second."""
MOST_SETTING = 512
"""Characters of one setting."""
_DEEPEST = 32
WHAT = "the body"


def read_body(content: bytes, content_type: str) -> dict[str, Any]:
    """The mapping that a request brings.

    Args:
        content: The body.
        content_type: Its header; JSON if it says so, else YAML.

    Raises:
        ConfigError: if it is too large, malformed, too deep, or uses aliases.
    """
    is_json = "json" in content_type.lower()
    most, kind = (MOST_JSON_BYTES, "JSON") if is_json else (MOST_YAML_BYTES, "YAML")
    if len(content) > most:
        raise must(WHAT, f"have at most {most:,} bytes of {kind}", len(content))
    if not is_json:
        _check_yaml(content)
    document = parse_document(content, WHAT, is_json=is_json)
    _check_depth(document)
    return document


def check_setting(text: str, what: str) -> None:
    """Refuses a setting in YAML that would unfold, nest deeply or take long to read.

    Raises:
        ConfigError: naming it.
    """
    if len(text) > MOST_SETTING:
        raise must(what, f"have at most {MOST_SETTING} characters", len(text))
    _check_yaml(text.encode("utf-8", "replace"), what)


def _check_yaml(content: bytes, what: str = WHAT) -> None:
    """Refuses aliases, of which a few lines make billions of values, and deep nesting."""
    depth = 0
    for event in _events(content, what):
        if isinstance(event, yaml.AliasEvent):
            raise must(
                what,
                "have no YAML aliases",
                f"*{event.anchor} in line {event.start_mark.line + 1}",
                "write the values out, or send JSON",
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise _too_deep(what)


def _events(content: bytes, what: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(content, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = mistake_words(error, content)
        raise ConfigError(f"{what} must be well-formed YAML, got {said}") from error


def _check_depth(document: Any) -> None:
    values = [document]
    for _ in range(_DEEPEST):
        inner = [value for value in values if isinstance(value, dict | list)]
        values = [
            v for value in inner for v in (value.values() if isinstance(value, dict) else value)
        ]
        if not values:
            return
    raise _too_deep()


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep(what: str = WHAT) -> ConfigError:
    return ConfigError(f"{what} must be nested at most {_DEEPEST} deep, got more")
