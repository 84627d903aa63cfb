"""Reads the documents of a configuration, overrides included."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tlora_megatron.config.reader import ConfigError, T, must, nearest, read_spec, show

_SUFFIXES = (".yaml", ".yml", ".json")
"""Ends of files' names that may hold a configuration."""


def read_document(
    path: Path, name: str = "configuration file", overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """Reads the mapping that a YAML or JSON (`.json`) file holds, which the user calls `name`.

    Overrides are texts `path=value`, applied in order.

    Raises:
        ConfigError: if the file is missing or malformed, repeats a key, or holds no mapping.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        why = f"{error.strerror}; {_like(path)}".removesuffix("; ")
        raise must(name, "be a readable file", str(path), why) from error
    document = parse_document(content, str(path), is_json=path.suffix.lower() == ".json")
    for override in overrides:
        apply_override(document, override)
    return document


def read_file(kind: type[T], path: Path, section: str, name: str) -> T:
    """Reads a file that is one section, as `read_document` and `read_spec` do; errors name it."""
    document = read_document(path, name)
    try:
        return read_spec(kind, document, section)
    except ConfigError as error:
        raise ConfigError(f"{error} in {path}") from None


def parse_document(content: bytes, what: str, *, is_json: bool) -> dict[str, Any]:
    """Reads the mapping that YAML or JSON holds; `what` is its name in errors.

    Raises:
        ConfigError: if it is malformed, repeats a key, or holds no mapping.
    """
    try:
        if is_json:
            document = json.loads(content, object_pairs_hook=_unique_pairs)
        else:
            document = yaml.load(content, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "JSON" if is_json else "YAML"
        said = mistake_words(error, content)
        raise ConfigError(f"{what} must be well-formed {kind}, got {said}") from error
    if not isinstance(document, dict):
        raise must(what, "hold a mapping of sections", document)
    return document


def _like(path: Path) -> str:
    """The file of the same folder whose name is most like one that is missing."""
    try:
        names = [file.name for file in path.parent.iterdir() if file.suffix in _SUFFIXES]
    except OSError:
        return ""
    return nearest(path.name, names)


def mistake_words(error: Exception, content: bytes) -> str:
    """Where a text is not well-formed and why, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if isinstance(error, json.JSONDecodeError):
        line, column, problem = error.lineno, error.colno, error.msg
    elif mark is not None and problem:
        line, column = mark.line + 1, mark.column + 1
    else:
        return " ".join(str(error).split())
    lines = content.decode(errors="replace").splitlines()
    text = lines[line - 1].strip() if line <= len(lines) else ""
    return f"line {line}, column {column}, {show(text)}: {problem}"


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merges mappings key by key, as copies; everything else in `base` is replaced by `over`."""
    merged = {**base, **over}
    for key, value in merged.items():
        if isinstance(value, dict):
            below = base.get(key) if key in over else None
            merged[key] = merge(below if isinstance(below, dict) else {}, value)
        elif isinstance(value, list):
            merged[key] = copy.deepcopy(value)
    return merged


def apply_override(document: dict[str, Any], override: str) -> None:
    """Sets one value in place: `run.seed=1`, `jobs[0].lora.rank=8`, `jobs.gsm8k.lora.rank=8`."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise must("--set", "be path=value", override)
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        said = getattr(error, "problem", None) or error
        raise ConfigError(
            f"--set {path} must be given a YAML value, got {text!r}: {said}"
        ) from error
    *parents, last = _split_path(path, document)
    node: Any = document
    for key in parents:
        node = (
            node.setdefault(key, {}) if isinstance(node, dict) else node[_locate(node, key, path)]
        )
    if isinstance(node, dict) and isinstance(last, str):
        node[last] = value
    else:
        node[_locate(node, last, path)] = value


def _split_path(path: str, document: dict[str, Any]) -> list[str | int]:
    head, _, rest = path.partition(".")
    if head == "jobs" and rest:
        # A job's name may hold dots, so it is matched whole, the longest first.
        for name in sorted(_names(document.get("jobs")), key=len, reverse=True):
            if rest == name or rest.startswith(f"{name}."):
                tail = rest[len(name) + 1 :]
                return ["jobs", name, *(_split_path(tail, {}) if tail else [])]
    keys: list[str | int] = []
    for part in path.split("."):
        match = re.fullmatch(r"([^\[\]]+)((?:\[\d+\])*)", part)
        if not match:
            raise must("--set", "name a path like jobs[0].lora.rank", path)
        keys += [match[1], *(int(index) for index in re.findall(r"\d+", match[2]))]
    return keys


def _locate(node: Any, key: str | int, path: str) -> int:
    """The position of an entry of the list `node`; `key` is its index or its `name`."""
    if not isinstance(node, list):
        raise ConfigError(
            f"--set {path} must lead through mappings and lists, got {show(node)} before {key!r}"
        )
    if isinstance(key, int) and key < len(node):
        return key
    names = _names(node)
    if key in names:
        return next(
            i for i, item in enumerate(node) if isinstance(item, dict) and item.get("name") == key
        )
    have = f"names {', '.join(names)}" if names else "no names"
    raise ConfigError(f"--set {path} must name one of {len(node)} entries ({have}), got {key!r}")


def _names(entries: Any) -> list[str]:
    entries = entries if isinstance(entries, list) else []
    names = (item.get("name") for item in entries if isinstance(item, dict))
    return [name for name in names if isinstance(name, str)]


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} stands twice in one mapping")
        result[key] = value
    return result


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML loader that refuses repeated keys, of which PyYAML silently keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        # Checks the nodes as written, because constructing them adds the keys of `<<`.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"key {key.value!r} stands twice in one mapping", key.start_mark
                )
            seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
        return node
