"""Refuses the keys of a DeepSpeed JSON that the installed DeepSpeed would pass over or not take.

There is no list of keys here: DeepSpeed reads each section from a mapping that notes what it is
asked for. So what is known is what the installed release reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any, get_args

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tlora_megatron.config.reader import ConfigError, must, nearest

_BATCH = {"train_micro_batch_size_per_gpu": 1}
"""The least that DeepSpeed wants of a JSON."""
_READ_ELSEWHERE = ("data_parallel_size", "sequence_parallel_size")
"""Top-level keys that `deepspeed.initialize` takes before it reads the rest."""
_REMARKS = ("_", "#", "//")
"""Keys that begin with one of these are people's remarks."""
_LIKENESS = 0.7
"""Least ratio of `difflib` at which a key is taken for a misspelt one: below it stand pairs such as
comms_config and tlora_config."""
_VERSION = str(deepspeed.__version__).strip()


class _Noting(dict[str, Any]):
    """A mapping that notes the keys it is asked for; copies of it are itself."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.content = content
        self.asked: set[str] = set()

    def __copy__(self) -> _Noting:
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Like `dict.get`."""
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Itself, so that `key in section.keys()` is noted, too."""
        return self

    def __iter__(self) -> Iterator[str]:
        # `Section(**mapping)` asks for every key, and Section then refuses those it does not know.
        for key in super().__iter__():
            self.asked.add(key)
            yield key


def check_keys(
    document: Mapping[str, Any], *, ours: Iterable[str], without_effect: Iterable[str]
) -> list[str]:
    """Refuses a key that DeepSpeed would ignore, and a section that it would not take.

    Args:
        document: a DeepSpeed JSON.
        ours: top-level keys that DeepSpeed does not read, and we do.
        without_effect: sections that DeepSpeed does not get; what they hold is not looked at.

    Returns:
        A sentence for each key within a section that DeepSpeed ignores and that is like none it
        reads: releases have dropped some.

    Raises:
        ConfigError: naming the key's path, and the known key that is most like it.
    """
    unchecked = {*ours, *without_effect, *_READ_ELSEWHERE}
    known = {*_top_level_keys(), *unchecked}
    told = []
    for key, value in document.items():
        if key.startswith(_REMARKS) or key in unchecked:
            continue
        if key not in known:
            raise _ignored(key, _nearest(key, known))
        told += _check_value(key, value)
    return told


@cache
def _top_level_keys() -> frozenset[str]:
    document = _Noting(_BATCH)
    with _quiet():
        DeepSpeedConfig(document)
    return frozenset(document.asked)


def _check_value(name: str, value: Any) -> list[str]:
    """Lets DeepSpeed read one top-level key; returns sentences as `check_keys` does."""
    section = _Noting(value) if isinstance(value, dict) else None
    try:
        with _quiet():
            DeepSpeedConfig({**_BATCH, name: value if section is None else section})
    except ValidationError as error:
        raise _not_taken(name, error) from error
    except Exception as error:  # of many kinds, some of them DeepSpeed's own
        raise must(name, "be what DeepSpeed takes", value, str(error).strip()) from error
    if section is None or section.get("enabled", True) is False:
        return []  # of a section that is off, DeepSpeed does not always read the rest
    passed_over = (key for key in section.content if key not in section.asked)
    told = []
    for key in passed_over:
        meant = _nearest(key, section.asked)
        if meant:
            raise _ignored(f"{name}.{key}", meant)
        if not key.startswith(_REMARKS):
            told.append(f"{name}.{key} has no effect: DeepSpeed {_VERSION} does not read it")
    return told


def _not_taken(name: str, error: ValidationError) -> ConfigError:
    """The error for a section that DeepSpeed refuses, naming the key that is meant."""
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    path = ".".join((name, *loc))
    if first["type"] != "extra_forbidden":
        return must(path, "be what DeepSpeed takes", first["input"], first["msg"])
    kind = _section_class(error.title, BaseModel)
    return _ignored(path, _nearest(loc[-1], _siblings(kind, loc[:-1])), "which does not take it")


def _section_class(title: str, root: type[BaseModel]) -> type[BaseModel] | None:
    """The class of this name among those of DeepSpeed's sections."""
    for kind in root.__subclasses__():
        found = kind if kind.__name__ == title else _section_class(title, kind)
        if found:
            return found
    return None


def _siblings(kind: type[BaseModel] | None, path: list[str]) -> list[str]:
    """Both names of each key of the section at this path below a class."""
    for key in path:
        inner = [f for name, f in _fields(kind) if key in (name, f.alias)]
        options = [get_args(field.annotation) or (field.annotation,) for field in inner]
        classes = [c for c in chain(*options) if isinstance(c, type) and issubclass(c, BaseModel)]
        kind = classes[0] if classes else None
    return [key for name, field in _fields(kind) for key in (name, field.alias) if key]


def _fields(kind: type[BaseModel] | None) -> list[tuple[str, FieldInfo]]:
    return list(kind.model_fields.items()) if kind else []


def _nearest(key: str, known: Iterable[str]) -> str:
    return nearest(key, sorted(known), likeness=_LIKENESS)


def _ignored(path: str, remedy: str, why: str = "which would ignore it") -> ConfigError:
    told = f"{path} is not a key of DeepSpeed {_VERSION}, {why}"
    return ConfigError(f"{told}; {remedy}" if remedy else told)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what DeepSpeed says while it reads: it reads the same again when it starts."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
