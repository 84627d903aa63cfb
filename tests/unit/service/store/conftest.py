"""Stores to test: each test of `place` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.postgres import emptied
from tlora_megatron.service.store import Store, open_store


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store's file or URL."""
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    return emptied(request.getfixturevalue("server"))


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The clock of `store`."""
    return Clock()


@pytest.fixture
def store(place: str, clock: Clock) -> Iterator[Store]:
    """An empty store."""
    with open_store(place, clock=clock) as opened:
        yield opened
