"""Checks that the installed DeepSpeed has the names that we use, and takes the keys of its JSON.

No method of DeepSpeed is overridden. Its model has nothing to train, so that of ZeRO only the hooks
that gather and release frozen weights run, and of AutoTP the sharding and the groups.

There is no list of keys here: DeepSpeed reads each section from a mapping that notes what it is
asked for. So what is known is what the installed release reads.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any, get_args

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tlora_megatron.config.reader import ConfigError, must, nearest

OLDEST = (0, 18, 0)
NEXT = (0, 20, 0)
"""The first release that is not supported."""
OLDEST_WITH_AUTOTP = (0, 19, 8)
"""Before it AutoTP has another call, or knows not all of transformers' plans, or no ZeRO-3."""

_RELIED_ON: dict[str, tuple[str, ...]] = {
    "deepspeed.initialize": ("model", "config"),
    "deepspeed.init_distributed": ("dist_backend",),
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": ("module", "ds_config"),
    "deepspeed.module_inject.layers.LinearLayer": ("mp_group",),
    "deepspeed.module_inject.layers.LinearAllreduce": ("mp_group",),
    "deepspeed.utils.groups.get_tensor_model_parallel_group": (),
    "deepspeed.utils.groups.get_data_parallel_group": (),
    "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig": (),
    "deepspeed.ops.__compatible_ops__": (),
}
"""Dotted name -> arguments that it must take."""


def check_deepspeed(tp_size: int = 1) -> None:
    """Refuses a DeepSpeed that is missing, of an untried version, or without what is relied on.

    Args:
        tp_size: over 1 needs AutoTP.

    Raises:
        ImportError: if it is missing.
        RuntimeError: naming the version or the name that does not fit.
    """
    try:
        installed = version("deepspeed")
    except PackageNotFoundError as error:
        raise ImportError(
            "DeepSpeed is missing: pip install 'tlora-megatron[deepspeed]'"
        ) from error
    check_version(installed, tp_size)
    for name, arguments in _RELIED_ON.items():
        _check_name(name, arguments, installed)


def check_version(installed: str, tp_size: int = 1) -> None:
    """Refuses a release out of the supported range.

    Raises:
        RuntimeError: naming the range.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    oldest, what = (OLDEST, "") if tp_size == 1 else (OLDEST_WITH_AUTOTP, " under AutoTP")
    if not oldest <= numbers < NEXT:
        low, high = (".".join(map(str, v)) for v in (oldest, NEXT))
        raise RuntimeError(f"DeepSpeed{what} must be >={low},<{high}, got {installed}")


def _check_name(name: str, arguments: tuple[str, ...], installed: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"deepspeed must have {name}, got {installed} without it") from error
    taken = inspect.signature(found).parameters if arguments else {}
    for argument in arguments:
        if argument not in taken:
            raise RuntimeError(
                f"{name} must take {argument}, got {', '.join(taken)} in deepspeed {installed}"
            )


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
