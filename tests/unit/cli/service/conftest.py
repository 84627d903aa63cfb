"""A service's folder, with a file of two jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tlora_megatron.service.home import VARIABLE, Home
from tlora_megatron.service.store import Store, open_store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The folder of a service that nobody has served yet."""
    root = tmp_path / "service"
    monkeypatch.setenv(VARIABLE, str(root))
    return Home.open(root)


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    """Its store, as a controller would hold it."""
    with open_store(home.store) as opened:
        yield opened


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run configuration with the jobs `one` and `two`."""
    (tmp_path / "base").mkdir()
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n')
    jobs: list[dict[str, Any]] = [
        {"name": name, "data": {"train": "data.jsonl"}, "max_steps": 5} for name in ("one", "two")
    ]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"base_model": {"path": "base"}, "jobs": jobs}))
    return path
