"""The arithmetic of the doors' bench, and that its rows keep one form."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from scripts.bench.doors.fused import throughput
from scripts.bench.doors.tenants import Step
from scripts.bench.harness.arguments import RESULTS
from scripts.bench.harness.rows import Figures


def test_throughput_counts_while_all_tenants_are_there() -> None:
    steps = [
        Step(0, 0.0, 1.0, 100),  # before the other tenant came
        Step(0, 2.0, 2.0, 100),
        Step(1, 3.0, 2.0, 100),
        Step(0, 6.0, 1.0, 100),
        Step(1, 6.0, 3.0, 100),  # after the first one's end
    ]
    assert throughput(steps) == pytest.approx(300 / (7.0 - 3.0))


def test_rows_have_the_form_of_those_that_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    notes = Figures(csv=path, commit="abc", engine="none")
    notes.spread("case", [0.001, 0.1], p99_ms=50.0)
    assert notes.missed == ["case, p99"]
    notes.row("ratio", 4.0, "", least=5.0)
    assert notes.missed == ["case, p99", "ratio"]
    kept = (RESULTS / "doors.csv").read_text(encoding="utf-8").splitlines()[0]
    rows = list(csv.DictReader(path.open()))
    assert list(rows[0]) == kept.split(",")
    assert [row["value"] for row in rows] == ["100", "100", "100", "4"]
