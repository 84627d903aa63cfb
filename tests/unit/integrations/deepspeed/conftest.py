"""Fixtures of the tests of DeepSpeed's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds a base and a job's data."""
    (tmp_path / "base").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    return tmp_path
