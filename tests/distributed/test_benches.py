"""Benches on two gloo processes: a measured machine, the planner held against it, overlap's
rows.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers.standing_world import world
from tlora_megatron.planner.hardware import HardwareProfile, load_profile

CASES = (
    "tiny/4 tp1 pp1 none 2j 256t",
    "tiny/4 tp2 pp1 full 2j 256t",
    "tiny/4 tp1 pp2 none 2j 256t",
)


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "cpu.json"
    argv = ("profile", "--out", path, "--budget-s", 5, "--gpus-per-node", 4)
    output = world("tlora_megatron.cli", 2, *argv)
    assert "written: " in output
    return path


@pytest.fixture(scope="module")
def profile(profile_path: Path) -> HardwareProfile:
    return load_profile(profile_path)


def test_a_measured_profile_is_whole(profile: HardwareProfile) -> None:
    assert profile.source == "measured"
    assert profile.dtype == "float32"
    assert profile.gpus_per_node == 4
    assert "megatron-core" in profile.versions
    assert len({(p.columns, p.inner) for p in profile.gemms}) >= 2


def test_links_are_measured_between_processes(profile: HardwareProfile) -> None:
    assert {(p.op, p.ranks) for p in profile.collectives} >= {("all_reduce", 2)}
    largest = max((p for p in profile.collectives if p.op == "all_reduce"), key=lambda p: p.bytes)
    assert profile.intra_node.bytes_per_s == pytest.approx(
        largest.bytes / largest.seconds, rel=0.01
    )


def test_predictions_and_measurements_come_as_rows(profile_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    argv = ("--hardware", profile_path, "--csv", out, "--rounds", 3, "--seconds", 1)
    output = world("scripts.bench.planner", 2, *argv, "--commit", "test", "--cases", *CASES)
    assert "3 cases\nstep time: median error" in output
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    layouts = [(int(r["tp"]), int(r["pp"]), int(r["dp"]), r["recompute"]) for r in rows]
    assert layouts == [(1, 1, 2, "none"), (2, 1, 1, "full"), (1, 2, 1, "none")]
    for row in rows:
        assert float(row["measured_s"]) > 0
        assert float(row["predicted_s"]) > 0
        # The rounds that are timed hold what the planner expects of the mean one.
        measured, expected = (int(row[f"{k}_round_tokens"]) for k in ("measured", "predicted"))
        assert measured == pytest.approx(expected, rel=0.05)
