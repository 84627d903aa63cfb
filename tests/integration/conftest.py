"""Turns off what whole runs in this process do without."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.helpers.lean import draw_no_reports


@pytest.fixture(scope="module", autouse=True)
def _lean_runs() -> Iterator[None]:
    """A module's runs draw no reports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)  # comes back at the end
        draw_no_reports()
        yield
