"""Makes checked values of a document's sections, and the sentences of what is wrong with one."""

from __future__ import annotations

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
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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
        if others and _origin(others[0]) is tuple:  # str | tuple[str, ...]
            hint = others[0] if isinstance(raw, list | tuple) else hint
        elif others and isinstance(raw, str):  # int | Literal["auto"]
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
