"""Recomputed layers see the micro-batch that they were first computed with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tlora_megatron.integrations.megatron import engine
from tlora_megatron.ops.routing import (
    Document,
    current_micro_batch,
    pack_micro_batch,
    use_micro_batch,
)


def test_transformer_engine_s_checkpoint_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's `te_checkpoint` imports the function when it is called."""
    kept: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    distributed = ModuleType("transformer_engine.pytorch.distributed")

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept.append((function, args, kwargs))
        return function(*args)

    distributed.checkpoint = checkpoint  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    engine._install_in_transformer_engine()
    engine._install_in_transformer_engine()
    first, second = (
        pack_micro_batch([Document(slot=0, length=n)], num_slots=1, num_tokens=4) for n in (3, 4)
    )
    with use_micro_batch(first):
        seen = distributed.checkpoint(lambda x: (x, current_micro_batch()), 5, tp_group=None)
    assert seen == (5, first)
    ((function, args, kwargs),) = kept
    assert kwargs == {"tp_group": None}
    with use_micro_batch(second):
        assert function(*args) == (5, first)
        assert current_micro_batch() is second


def test_without_transformer_engine_there_is_nothing_to_cover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # its import fails
    engine._install_in_transformer_engine()
