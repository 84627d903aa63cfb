"""The benchmark of a service's store writes a row for each figure."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from scripts.bench import live_store


def test_a_row_for_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--submits", "20", "--writers", "1", "--queued", "10", "--running", "5"]
    assert live_store.main([*sizes, "--commit", "abc", "--csv", "rows.csv"]) == 0
    with Path("rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["gpu"], row["commit"], row["engine"]) for row in rows} == {
        ("cpu", "abc", "store, SQLite")
    }
    cases = {row["case"]: row["unit"] for row in rows}
    assert {"submits": "1/s", "start with 15 jobs": "s", "poll": "us"}.items() <= cases.items()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
