"""A PostgreSQL server for the tests of one process, and the loop of those that are coroutines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.postgres import postgres_server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """URL of a PostgreSQL database."""
    with postgres_server() as url:
        yield url
