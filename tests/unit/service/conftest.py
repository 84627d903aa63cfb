"""A service's folder, a PostgreSQL server, and the loop of tests that are coroutines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.postgres import postgres_server
from tlora_megatron.service.home import Home


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A service's folder."""
    return Home.open(tmp_path / "service")


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """URL of a PostgreSQL database, for the tests of one process."""
    with postgres_server() as found:
        yield found.url
