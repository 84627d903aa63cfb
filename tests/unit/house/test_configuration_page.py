"""docs/configuration.md names every key, with its default and its rule."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def writer(repo: Path) -> ModuleType:
    path = repo / "scripts" / "configuration_page.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_classes_say(writer: ModuleType) -> None:
    written = writer.PAGE.read_text(encoding="utf-8")
    assert written == writer.page(), "run scripts/configuration_page.py"


@pytest.mark.parametrize(
    "row",
    [
        "| `optimizer.lr` | number, above 0 | `0.0002` | peak learning rate |",
        "| `output_dir` | string | required | directory for the run",
        "| `nano_batches` | integer or `auto`, at least 1, at most 16 | `1` | number of parts",
        "| `optimizer.betas` | list of 2 numbers, at least 0, below 1 | `[0.9, 0.999]` | decay",
    ],
)
def test_a_row_says_type_range_and_default(writer: ModuleType, row: str) -> None:
    assert f"\n{row}" in writer.page()
