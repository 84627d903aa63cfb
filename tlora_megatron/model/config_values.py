"""Numbers of a `config.json`, or a refusal that names the key; the file is the caller's to name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def count(
    values: Mapping[str, Any], key: str, *, default: int | None = None, least: int = 1
) -> int:
    """Returns an integer; null, or no key, means `default` if there is one."""
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key} must be an integer of at least {least}, got {value!r}")
    return value


def positive(values: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """Returns a finite number above 0; null, or no key, means `default` if there is one."""
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a positive number, got {value!r}")
    return float(value)
