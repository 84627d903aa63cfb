"""A service's folder in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.live_service import folder_in_memory


@pytest.fixture
def root() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder / "service"
