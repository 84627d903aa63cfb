"""Jobs whose batches and steps a client asks for: how they are written, and what they leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_megatron.config.reader import ConfigError, must

KEY = "driven"
NO_DATA = "(none: a client sends it)"
"""The value of `data.train` of a job that has no data."""
_LEFT_OUT = (
    "data",
    "max_steps",
    "epochs",
    "optimizer",
    "schedule",
    "eval_every_steps",
    "on_nonfinite",
)
"""Keys whose values come with a client's requests, or that have no meaning."""


def is_driven(entry: Mapping[str, Any]) -> bool:
    """True if a job's entry says that a client drives it."""
    return entry.get(KEY) is True


def filled(entry: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns a driven job's entry with a value where every other job has its data.

    Raises:
        ConfigError: naming the first key that such a job must leave out.
    """
    for key in _LEFT_OUT:
        if entry.get(key) is not None:
            why = "a client sends what it is to be"
            raise must(f"{path}.{key}", "be left out of a driven job", entry[key], why)
    return {**entry, "data": {"train": NO_DATA}}


def without_fillings(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entry of a driven job from all of its values: what `filled` takes."""
    return {key: value for key, value in document.items() if key not in _LEFT_OUT}


def refuse_driven(name: str) -> ConfigError:
    """The error for a driven job where there is no client."""
    return ConfigError(
        f"driven of job {name!r} must be false here: its client asks a service, `tlora serve`"
    )
