"""Sweeps in a controller over fake gangs: halving, kills, trials that end, and little room."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.floor_model import FloorModel
from tests.helpers.live_service import FloorCost, LiveService
from tlora_megatron.cli.tables import sweep_line
from tlora_megatron.config.sweep import read_sweep
from tlora_megatron.service.sweeps import add_sweep, find_sweep, shown_sweep

STEPS = 20
SCORES = {f"math-{n}": score for n, score in enumerate((3.0, 1.0, 4.0, 1.5, 9.0, 2.0))}
STOP = {"keep": 0.34, "at": [0.25, 0.5]}


def submit(service: LiveService) -> dict[str, str]:
    """Submits six trials as one sweep; returns their ids by name."""
    service.engine.scores = SCORES
    sweep, _ = read_sweep(
        {"list": [{"seed": n} for n in range(6)], "stop": STOP},
        {"name": "math", "data": {"eval": "x"}},
    )
    ids = {
        name: service.submit(name, steps=STEPS, max_slowdown=9.0, sweep="s1")
        for name in sweep.settings
    }
    rows = [service.job(ids[name]) for name in ids]
    first, *rest = rows
    with service.store.transaction():
        add_sweep(service.store, "s1", sweep, [replace(first, is_new=True), *rest])
    return ids


def outcome(service: LiveService, ids: dict[str, str]) -> dict[str, Any]:
    jobs = {name: service.job(job) for name, job in ids.items()}
    return {name: (str(job.state), job.step, job.error) for name, job in jobs.items()}


CHOSEN = {
    "math-0": ("cancelled", 5, "stopped at step 5: 4th of 6 by eval_loss (3; the 3rd has 2)"),
    "math-1": ("finished", 20, None),
    "math-2": ("cancelled", 5, "stopped at step 5: 5th of 6 by eval_loss (4; the 3rd has 2)"),
    "math-3": ("finished", 20, None),
    "math-4": ("cancelled", 5, "stopped at step 5: 6th of 6 by eval_loss (9; the 3rd has 2)"),
    "math-5": ("cancelled", 10, "stopped at step 10: 3rd of 3 by eval_loss (2; the 2nd has 1.5)"),
}


@pytest.mark.parametrize("most_jobs", [None, 2])
def test_the_best_go_on_also_where_not_all_have_room_at_once(
    root: Path, most_jobs: int | None
) -> None:
    service = LiveService(root, cost=FloorCost(model=FloorModel(), most_jobs=most_jobs))
    ids = submit(service)
    service.run()
    assert outcome(service, ids) == CHOSEN
    alone = LiveService(root / "alone")
    lone = alone.submit("math-1", steps=STEPS)
    alone.run()
    assert service.adapter(ids["math-1"]) == alone.adapter(lone)
    assert service.sentences("stopped")[0].startswith("job 'math-")
    for number, name in enumerate(("math-3", "math-1")):
        summary = {"status": "finished", "eval_loss_after": 0.1 + number}
        (service.home.job(ids[name]) / "summary.json").write_text(json.dumps(summary))
    shown = shown_sweep(find_sweep(service.store, "math", "local"), service.home)
    assert [len(rung["kept"]) for rung in shown["rungs"]] == [3, 2]
    assert sweep_line(shown) == (
        "math: 6 trials: 4 cancelled, 2 finished; 2 of 2 rungs decided; best math-3 "
        "(seed 3, eval_loss 0.1)"
    )


@pytest.mark.parametrize("every_s", [0.7, 3.1])
def test_kills_of_controllers_and_gangs_change_no_choice(root: Path, every_s: float) -> None:
    service = LiveService(root)
    ids = submit(service)
    for turn in range(60):
        service.run(every_s)
        service.restart()
        if turn % 7 == 6 and service.gang.alive:
            service.gang.die("killed", was_killed=True)
    service.run()
    assert not service.engine.doubled
    found = outcome(service, ids)
    # A trial whose gang dies before it has left the rung was saved before it.
    assert {n: (s, e) for n, (s, _, e) in found.items()} == {
        n: (s, e) for n, (s, _, e) in CHOSEN.items()
    }


def test_a_trial_that_is_cancelled_counts_as_the_worst_and_nobody_waits_for_it(root: Path) -> None:
    service = LiveService(root)
    ids = submit(service)
    service.run(5)
    (start,) = find_sweep(service.store, "s1", None).stages()
    assert [name for name, _ in start["trials"]] == list(ids)
    assert "running" in {word for _, word in start["trials"]} <= {"running", "queued"}
    service.store.jobs.request_actions([ids["math-1"]], "cancel")
    service.run()
    first, second, end = find_sweep(service.store, "s1", None).stages()
    kept = [name for name, word in first["trials"] if word == "kept"]
    assert kept == [name for name, _ in second["trials"]] == ["math-0", "math-3", "math-5"]
    assert end["trials"] == [["math-3", "finished"], ["math-5", "finished"]]
    found = outcome(service, ids)
    assert found["math-1"][0] == "cancelled"
    assert found["math-1"][2] is None
    assert [name for name, (state, *_) in found.items() if state == "finished"] == [
        "math-3",
        "math-5",
    ]
