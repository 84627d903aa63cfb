"""Counts what a computation does instead of how long it takes: a busy machine changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(function: Callable[[], object]) -> int:
    """Number of Python and built-in functions that a call of `function` comes to."""
    count = 0

    def tell(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tell)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
