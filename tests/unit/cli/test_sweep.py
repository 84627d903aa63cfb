"""`tlora sweep --dry-run`: what the planner says of a sweep before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.commands import Tlora

SWEEP = Path(__file__).parents[3] / "configs" / "quickstart_sweep.yaml"
DRY = ("sweep", SWEEP, "--dry-run", "--hardware", "cpu", "--lengths", "40")


def test_a_dry_run_says_what_stopping_saves(tlora: Tlora) -> None:
    found = tlora.json(*DRY)
    parts = found["stretches"]
    assert [(part["num_trials"], part["to_step"]) for part in parts] == [
        (12, 10),
        (5, 30),
        (2, 100),
    ]
    assert found["time_s"] == pytest.approx(sum(part["time_s"] for part in parts))
    assert 0 < found["time_s"] < 0.5 * found["whole_s"] < 0.5 * found["alone_s"]
    told = tlora(*DRY, "--nproc", 2)
    assert "12 trials on 2 x CPU: " in told
    for line in ("5 trials to step 30", "together, with stopping", "one after another"):
        assert line in told


def test_without_rungs_all_go_to_their_ends_and_epochs_count_rows(tlora: Tlora) -> None:
    epochs = ("--set", "job.max_steps=null", "--set", "job.epochs=2")
    found = tlora.json(*DRY, "--set", "sweep.stop=null", *epochs)
    (part,) = found["stretches"]
    rows = len((SWEEP.parent / "quickstart" / "data" / "sums_train.jsonl").read_text().splitlines())
    assert (part["num_trials"], part["to_step"]) == (12, -(-2 * rows // 8))
    assert found["time_s"] == pytest.approx(found["whole_s"])


def test_the_planners_options_come_with_a_dry_run(tlora: Tlora) -> None:
    told = tlora("sweep", SWEEP, "--hardware", "cpu", code=2)
    assert "--hardware must come with --dry-run, got 'cpu'" in told
    base = SWEEP.parent / "models" / "llama-3.1-70b.json"
    large = ("--set", f"base_model={{config: {base}, random_init: true}}", "--hardware", "l40s")
    told = tlora(*DRY, *large, code=2)
    assert "a sweep's trials must fit into memory together, got 12 that need" in told
