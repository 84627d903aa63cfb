"""Predictions over routed experts beside what was measured on an H200 (scripts.bench.experts)."""

from __future__ import annotations

import csv
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scripts.bench.experts import predicted
from scripts.bench.experts.mixes import CASES
from scripts.bench.experts.predicted import MODES, Predictor, case_of, main, measured_rows
from tlora_megatron.planner.cost.rates import EXPERT_TIMES, ExpertTimes
from tlora_megatron.planner.hardware import load_profile

_TYPICAL, _WORST = 0.05, 0.15
"""Errors of times, of all rows."""
_MEMORY = 0.06


@pytest.fixture(scope="module")
def predictor(repo: Path) -> Predictor:
    return Predictor(load_profile(repo / "configs/hardware/h200.json"))


@pytest.fixture
def compared(repo: Path) -> list[dict[str, str]]:
    """The rows that are in the repository with their predictions."""
    path = repo / "scripts/bench/results/experts_predicted.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _measured(row: dict[str, str]) -> dict[str, str]:
    """The row as `scripts.bench.experts` has written it."""
    case = CASES[row["case"]]
    return {
        "gpu": row["gpu"],
        "world": "1",
        "commit": row["commit"],
        "model": row["model"],
        "layers": row["layers"],
        "routing": "uniform",
        "tokens_per_gpu": row["tokens"],
        "micro_batches_per_step": row["micro_batches"],
        "jobs": str(len(case.ranks)),
        "targets": "attention" if case.expert_ranks is None else "all",
        "expert_rank": case.shown_expert_rank,
        "sharing": case.sharing,
        "mode": row["mode"],
        "step_ms": row["measured_ms"],
        "peak_bytes": row["measured_bytes"],
    }


def test_measured_steps_are_predicted(predictor: Predictor, compared: list[dict[str, str]]) -> None:
    rows = [predictor.row(_measured(row)) for row in compared]
    assert {(row.case, row.mode) for row in rows} >= {(c, m) for c in CASES for m in MODES}
    errors = [abs(row.time_error) for row in rows]
    assert statistics.median(errors) < _TYPICAL
    assert max(errors) < _WORST
    assert max(abs(row.memory_error) for row in rows) < _MEMORY


def test_a_fit_finds_the_times_that_rows_were_made_with(
    predictor: Predictor, compared: list[dict[str, str]]
) -> None:
    made = ExpertTimes(routing_s=400e-6, outer_linear_s=0.0, job_step_s=2e-3)
    rows = []
    for row in map(_measured, compared):
        rows.append(row | {"step_ms": str(predictor.row(row, made).predicted_ms)})
    found = predictor.fitted(rows)
    assert found.routing_s == pytest.approx(made.routing_s, rel=0.01)
    assert found.job_step_s == pytest.approx(made.job_step_s, rel=0.01)
    assert found.outer_linear_s == pytest.approx(0.0, abs=1e-6)
    # A time that would have to be negative is left out.
    slower = replace(made, job_step_s=0.0)
    fast = [
        row | {"step_ms": str(predictor.row(row, slower).predicted_ms * share)}
        for row in map(_measured, compared)
        for share in [0.97 if row["mode"] == "step" else 1.0]
    ]
    assert predictor.fitted(fast).job_step_s == 0.0


def test_rows_of_the_last_commit_on_one_gpu_are_compared(
    tmp_path: Path, compared: list[dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    row = _measured(compared[0])
    others = [
        row | {"commit": "old"},
        row | {"world": "2"},
        row | {"mode": "hf_peft (1 x 1 x 1024)"},
        row,
    ]
    path, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows(others)
    assert measured_rows(path) == [row]
    assert main(["--rows", str(path), "--csv", str(out)]) == 0
    assert "all: 1 rows, median error" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    with pytest.raises(ValueError, match="a row must be of a case of scripts"):
        case_of(row | {"jobs": "3"})


def test_times_that_predictions_use_are_positive() -> None:
    assert min(asdict(EXPERT_TIMES).values()) > 0
    assert tuple(asdict(EXPERT_TIMES)) == predicted.NAMES
