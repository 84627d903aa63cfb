"""A service over HTTP, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.http_service import Api, open_api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """A service of its own, with nobody's jobs."""
    with open_api(tmp_path / "service") as opened:
        yield opened
