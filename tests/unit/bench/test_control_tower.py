"""The benchmark of decisions and plans writes a row for each thing that it times."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from scripts.bench import control_tower


def test_a_row_for_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    options = ["--policies", "isolated", "isolated_sjf", "--repeats", "1", "--no-search"]
    names = ["--machine", "a machine", "--commit", "abc"]
    assert control_tower.main([*options, *names, "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == ["decide isolated", "decide isolated_sjf"]
    assert all(int(row["count"]) > 0 for row in rows), "jobs wait and GPUs are free"
    assert {(row["machine"], row["commit"]) for row in rows} == {("a machine", "abc")}
    assert "decide isolated_sjf" in capsys.readouterr().out
