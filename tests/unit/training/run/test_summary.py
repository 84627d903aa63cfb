"""The contents of a run's summary."""

from __future__ import annotations

import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from tlora_megatron.training.run import summary


def test_the_version_of_megatron_core_is_that_of_the_one_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    assert summary.versions()["megatron-core"] == version("megatron-core")
    checkout = SimpleNamespace(__version__="0.99.0")
    monkeypatch.setitem(sys.modules, "megatron.core", checkout)  # type: ignore[arg-type]
    assert summary.versions()["megatron-core"] == "0.99.0"
