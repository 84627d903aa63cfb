"""Reads a configuration's documents, overrides included, and makes checked values of them."""

from __future__ import annotations

import copy
import difflib
import json
import math
import operator
import re
import reprlib
import types
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_LARGEST_INT = 2**63 - 1  # seeds and counts end up in int64 tensors
_LIMITS = (
    ("ge", operator.ge, "at least"),
    ("gt", operator.gt, "above"),
    ("le", operator.le, "at most"),
    ("lt", operator.lt, "below"),
)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class ConfigError(ValueError):
    """A mistake in the configuration or command line; the message names the place."""


def must(path: str, obligation: str, value: Any, remedy: str = "") -> ConfigError:
    """The error `<path> must <obligation>, got <value>; <remedy>`."""
    return ConfigError(
        f"{path} must {obligation}, got {show(value)}" + (f"; {remedy}" if remedy else "")
    )


_NAMES_ELSEWHERE = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
}
"""What PEFT and Hugging Face's Trainer call some keys."""


def unknown(path: str, key: Any, valid: Iterable[str]) -> ConfigError:
    """The error for a key that is not in `valid`; it names the key that was probably meant."""
    valid = list(valid)
    meant = _NAMES_ELSEWHERE.get(str(key))
    hint = f"did you mean {meant}?" if meant in valid else nearest(key, valid)
    hint = hint or f"valid keys are {', '.join(valid)}"
    return ConfigError(f"{_join(path, key)} is not a known key; {hint}")


def read_spec(kind: type[T], raw: Any, path: str) -> T:
    """Makes a `kind` from a mapping, checked by annotations and limits, or refuses it."""
    spec: T = _read_dataclass(kind, raw, path, partial=False)
    return spec


def check_partial(kind: type, raw: Any, path: str) -> None:
    """Checks a mapping as `read_spec` does, but lets required keys be missing."""
    _read_dataclass(kind, raw, path, partial=True)


def _read_dataclass(kind: Any, raw: Any, path: str, *, partial: bool) -> Any:
    if not isinstance(raw, dict):
        raise must(
            path, "be a mapping", raw, "leave the key out for its defaults" if raw is None else ""
        )
    known, hints = _fields(kind), _hints(kind)
    for key in raw:
        if key not in known:
            raise _misplaced(path, key, hints) or unknown(path, key, known)
    values = {
        name: _read_value(raw[name], hints[name], _join(path, name), item.metadata, partial)
        for name, item in known.items()
        if name in raw
    }
    if partial:
        return values
    for name, item in known.items():
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        if name not in values and not has_default:
            raise ConfigError(
                f"{_join(path, name)} must be given: {item.metadata.get('doc', item.name)}"
            )
    return kind(**values)


_origin = cache(get_origin)
_hints = cache(get_type_hints)
"""Annotations as types; a service reads thousands of specs of few kinds."""


@cache
def _fields(kind: Any) -> dict[str, Field[Any]]:
    return {item.name: item for item in fields(kind)}


def _misplaced(path: str, key: Any, hints: dict[str, Any]) -> ConfigError | None:
    """The error for a key that belongs one level deeper; None for other keys."""
    for name, hint in hints.items():
        if is_dataclass(hint) and key in {item.name for item in fields(hint)}:
            return ConfigError(f"{_join(path, key)} is not a known key; did you mean {name}.{key}?")
    return None


def _read_value(raw: Any, hint: Any, path: str, limits: Any, partial: bool) -> Any:
    if _origin(hint) in (Union, types.UnionType):
        options = get_args(hint)
        if raw is None and types.NoneType in options:
            return None
        hint, *others = (option for option in options if option is not types.NoneType)
        if others and isinstance(raw, str):  # int | Literal["auto"]
            return _read_choice(raw, get_args(others[0]), path, "a number or ")
    if is_dataclass(hint):
        return _read_dataclass(hint, raw, path, partial=partial)
    if _origin(hint) is tuple:
        return _read_tuple(raw, get_args(hint), path, limits, partial)
    if _origin(hint) is Literal:
        return _read_choice(raw, get_args(hint), path)
    value: Any = _SCALARS[hint](raw, path)
    for key, holds, words in _LIMITS:
        if key in limits and not holds(value, limits[key]):
            raise must(path, f"be {words} {limits[key]}", value)
    if limits.get("nonempty") and value == "":
        raise must(path, "not be empty", value)
    return value


def _read_tuple(
    raw: Any, items: tuple[Any, ...], path: str, limits: Any, partial: bool
) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise must(path, "be a list", raw)
    if items[-1] is Ellipsis:
        items = (items[0],) * len(raw)
    elif len(raw) != len(items):
        raise must(path, f"be a list of {len(items)} values", raw)
    if limits.get("nonempty") and not raw:
        raise must(path, "not be empty", raw)
    return tuple(
        _read_value(value, hint, f"{path}[{index}]", limits, partial)
        for index, (value, hint) in enumerate(zip(raw, items, strict=True))
    )


def _read_choice(raw: Any, options: tuple[Any, ...], path: str, also: str = "") -> Any:
    # 1 == True, so a bool could pass for a number without the second condition.
    if raw in options and not isinstance(raw, bool):
        return raw
    words = ", ".join(map(str, options))
    among = words if also and len(options) == 1 else f"one of {words}"
    raise must(path, f"be {also}{among}", raw, nearest(raw, options))


def _read_str(raw: Any, path: str) -> str:
    if not isinstance(raw, str):
        raise must(path, "be a string", raw, "put it in quotes" if raw is not None else "")
    if "\0" in raw:
        raise must(path, "hold no null character", raw)
    try:
        raw.encode("utf-8", "surrogateescape")  # names of files may be other bytes
    except UnicodeEncodeError:
        raise must(path, "be Unicode text", raw, "a surrogate stands alone in it") from None
    return raw


def _read_bool(raw: Any, path: str) -> bool:
    if not isinstance(raw, bool):
        raise must(path, "be true or false", raw)
    return raw


def _read_int(raw: Any, path: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise must(path, "be an integer", raw)
    if abs(raw) > _LARGEST_INT:
        raise must(path, "fit in 64 bits", raw)
    return raw


def _read_float(raw: Any, path: str) -> float:
    # YAML 1.1 reads 2e-4 as a string: it wants 2.0e-4. Everybody writes 2e-4.
    if isinstance(raw, str) and _NUMBER.fullmatch(raw):
        raw = float(raw)
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        raise must(path, "be a number", raw)
    if (isinstance(raw, int) and abs(raw) > _LARGEST_INT) or not math.isfinite(raw):
        raise must(path, "be a finite number", raw)
    return float(raw)


_SCALARS = {str: _read_str, bool: _read_bool, int: _read_int, float: _read_float}


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def nearest(value: Any, options: Iterable[Any], *, likeness: float = 0.6) -> str:
    """The remedy that names the option most like `value`, by `difflib`'s ratio; or else empty."""
    words = [str(option) for option in options]
    near = difflib.get_close_matches(str(value), words, n=1, cutoff=likeness)
    return f"did you mean {near[0]}?" if near else ""


def show(value: Any) -> str:
    """A value as an error message prints it: YAML's words for null and booleans, long ones cut."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _SHORT.repr(value)


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
