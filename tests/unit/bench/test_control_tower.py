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


def test_the_first_run_is_apart_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0, 8.0, 11.0])
    monkeypatch.setattr(control_tower.time, "process_time", lambda: next(now_s))
    assert control_tower.timed(lambda: "ab", 3) == (2, 5000.0, 2000.0)
