"""A service over HTTP, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.http_service import Door, open_door


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    """A service of its own, with nobody's jobs."""
    with open_door(tmp_path / "service") as opened:
        yield opened
