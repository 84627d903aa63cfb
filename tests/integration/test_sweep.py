"""A sweep in one process: survivors are the jobs alone to the bit, and no kill changes a choice."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import Tlora
from tests.helpers.scenario_worlds import entry, run_cases
from tests.helpers.sweeps import RUNGS, STEPS, SURVIVORS, WORST, alone, digest, found, make_sweep
from tlora_megatron.training.formats.checkpoint import step_folder

KILLS: dict[str, tuple[str, int]] = {
    "at the first rung": ("step", 12),
    "while a rung is saved": ("write", 4),
    "at the second rung": ("step", 18),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sweep")
    path = make_sweep(root)
    cases = [entry(path, root / "whole", sweep=True, report=True)]
    for name, kill in KILLS.items():
        out = root / name
        cases += [entry(path, out, sweep=True, kill=kill), entry(path, out, sweep=True)]
    cases += [entry(alone(path, name), root / "alone" / name) for name in SURVIVORS]
    # Saved behind every step, and ended right behind the rung's.
    every, stop = "run.checkpoint_every_steps=1", [WORST, RUNGS[0] + 1]
    cases.append(entry(alone(path, WORST), root / "alone" / WORST, [every], stop=stop))
    run_cases(1, cases, root / "cases.json")
    return root


def ranking(root: Path) -> list[dict[str, Any]]:
    return json.loads((root / "whole" / "sweep.json").read_text())["ranking"]


def test_survivors_have_the_bits_of_the_job_alone_and_stopped_ones_of_a_part_of_it(
    runs: Path,
) -> None:
    rows = {row["trial"]: row for row in ranking(runs)}
    whole, lone = runs / "whole" / "jobs", runs / "alone"
    assert [row["status"] for row in rows.values()] == ["finished"] * 2 + ["cancelled"] * 4
    adapter = Path("adapter", "adapter_model.safetensors")
    for name in SURVIVORS:
        assert (rows[name]["status"], rows[name]["steps"]) == ("finished", STEPS)
        assert digest(whole / name / adapter) == digest(lone / name / "jobs" / name / adapter)
    assert rows[WORST]["steps"] == RUNGS[0]
    saved = step_folder(Path(WORST, "checkpoints"), RUNGS[0])
    for file in (saved / "adapter.safetensors", saved / "optimizer.safetensors"):
        assert digest(whole / file) == digest(lone / WORST / "jobs" / file), file


def test_a_stopped_trial_says_why_and_results_are_written(runs: Path) -> None:
    rows = ranking(runs)
    whole = runs / "whole"
    worst = next(row for row in rows if row["trial"] == WORST)
    assert worst["reason"].startswith("stopped at step 2: 6th of 6 by eval_loss (")
    last = next(row for row in rows if row["steps"] == RUNGS[1])
    third, second = (row["rung_scores"][1] for row in (last, max(rows[:2], key=_second)))
    assert last["reason"] == (
        f"stopped at step 4: 3rd of 3 by eval_loss ({third:.4g}; the 2nd has {second:.4g})"
    )
    lines = list(csv.DictReader((whole / "sweep.csv").read_text().splitlines()))
    assert [line["trial"] for line in lines] == [row["trial"] for row in rows]
    assert [float(line["optimizer.lr"]) for line in lines] == [
        row["settings"]["optimizer.lr"] for row in rows
    ]
    page = (whole / "report.html").read_text()
    best = rows[0]["trial"]
    assert f'<a href="jobs/{best}/adapter">its adapter</a>' in page
    assert 'id="job-' in page
    assert page.count('class="card"') == len(SURVIVORS)
    assert "optimizer.lr" in page


def _second(row: dict[str, Any]) -> float:
    return float(row["rung_scores"][1])


@pytest.mark.parametrize("name", KILLS)
def test_a_kill_changes_neither_choice_nor_bit(runs: Path, name: str) -> None:
    lives = (runs / name / "starts.jsonl").read_text().splitlines()
    assert len(lives) == 2, "it was killed and continued"
    assert found(runs / name) == found(runs / "whole")


def test_the_folder_of_another_sweep_is_refused(runs: Path, tlora: Tlora) -> None:
    path, out = runs / "sweep.yaml", runs / "whole"
    other = ("--set", "sweep.stop.keep=0.5")
    told = tlora("sweep", path, "--output-dir", out, *other, code=2)
    assert "run.output_dir must be new or hold this sweep" in told
    assert "sweep.stop" in told
    again = tlora("sweep", path, "--output-dir", out)
    assert f"best: {ranking(runs)[0]['trial']} (optimizer.lr" in again
    assert "46% of all trials' steps were not needed" in again
