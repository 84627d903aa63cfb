"""Imports Megatron-core without torch's compiler, which is a second of import that few runs use.

Megatron decorates functions with `torch.compile` when it is imported, and the first such function
imports the compiler. This module itself imports no Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def lazy_compile() -> Iterator[None]:
    """Lets what is decorated inside with `torch.compile` be compiled at its first call."""
    whole = torch.compile
    torch.compile = functools.partial(_decorate, whole)
    try:
        yield
    finally:
        torch.compile = whole


def _decorate(
    whole: Callable[..., Any], model: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    if model is None:
        return functools.partial(_decorate, whole, **options)
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(whole(model, **options))
        return compiled[0](*args, **kwargs)

    return call
