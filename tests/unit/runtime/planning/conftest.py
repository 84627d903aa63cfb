"""The quickstart to plan, and profiles of machines on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.planner_case import HARDWARE
from tlora_megatron.cli.profile import profile_json

ProfileFile = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def quickstart(repo: Path) -> str:
    return str(repo / "configs/quickstart.yaml")


@pytest.fixture
def profile_file(tmp_path: Path) -> ProfileFile:
    """Writes a profile with a change, or with other values."""

    def write(change: Callable[[dict[str, Any]], object] = dict, **values: Any) -> Path:
        document = json.loads(profile_json(HARDWARE)) | values
        change(document)
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(document))
        return path

    return write
