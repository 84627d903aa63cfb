"""Imports Megatron-core without torch's compiler and without the warnings that no user can act on.

Megatron decorates functions with `torch.compile` when it is imported, and the first such function
imports the compiler. Only the messages below are silenced, each by its beginning and the module it
comes from. This module itself imports neither Megatron nor torch.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lazy_compile() -> Iterator[None]:
    """Lets what is decorated inside with `torch.compile` be compiled at its first call."""
    import torch

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


_MEGATRON = r"megatron\.core\."
_WARNINGS = (
    # Kernels of Transformer Engine and Apex: the backbone is built from the local layer spec, with
    # this package's norm and attention; Megatron's optimizers are not used.
    ("Transformer Engine and Apex are not installed", UserWarning, _MEGATRON),
    ("Apex is not installed", UserWarning, _MEGATRON),
    # It warns of its own default value.
    ("full scope is deprecated", UserWarning, _MEGATRON),
    # Megatron's sequence and context parallelism calls torch 2.13's collectives by their old names.
    (r"`torch\.distributed\.all_gather_into_tensor` is dep", FutureWarning, r"torch\.distributed"),
    (r"`torch\.distributed\.reduce_scatter_tensor` is dep", FutureWarning, r"torch\.distributed"),
)
_RECORDS = {
    # From 0.19 on; its successor, HybridModel, is not in 0.16.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
}


def quieten() -> None:
    """Silences the messages in this process; a second call changes nothing."""
    for message, category, module in _WARNINGS:
        warnings.filterwarnings("ignore", message, category, module)
    for name, beginning in _RECORDS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(beginning))


class _Without(logging.Filter):
    """Lets every record through but those with a certain beginning."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginning)
