"""The overlap benchmark on a tiny decoder over gloo: every variant is right and has its row."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers.standing_world import world

SKIPS = ("", " skipped")


@pytest.mark.parametrize(
    ("case", "flags"),
    [
        ("4x32:2", ()),
        pytest.param("2x32:4", ("--sequence-parallel",), marks=pytest.mark.slow),
    ],
)
def test_rows_of_a_tiny_case(tmp_path: Path, case: str, flags: tuple[str, ...]) -> None:
    path = tmp_path / "rows.csv"
    few = ("--counts", "2", "--rounds", "2", "--controller-steps", "12", "--csv", path)
    output = world("scripts.bench.overlap", 2, "--cases", f"tiny:{case}", *few, *flags)
    # A variant whose gradient is not the whole micro-batch's is left out.
    assert "left out" not in output, output
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    mine = {(row["mechanism"], row["nano_batches"]): row for row in rows}
    references = {(f"{frozen}none{skip}", "1") for frozen in ("", "frozen ") for skip in SKIPS}
    split = {(name, "2") for name in ("gloo", "skipped")}
    assert references | split <= mine.keys()
    assert any(mechanism == "controller gloo" for mechanism, _ in mine)
    step, bare, whole = (
        float(mine["gloo", "2"][name]) for name in ("step_ms", "no_comm_ms", "no_split_ms")
    )
    if whole - bare > 1.0:  # rounded to microseconds
        share = float(mine["gloo", "2"]["hidden_share"])
        assert share == pytest.approx((whole - step) / (whole - bare), rel=0.01, abs=0.01)
    for row in rows:
        shape, adapters = case.split(":")
        assert (row["world"], row["model"], row["tokens"]) == ("2", "tiny", shape)
        assert row["adapters"] == ("0" if row["mechanism"].startswith("frozen") else adapters)
