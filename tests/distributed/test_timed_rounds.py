"""Rounds shared out by time: every job gets what PEFT gives it alone, resumed or beside others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scenario import (
    JOBS,
    assert_run_equals_oracle,
    assert_same_bits,
    assert_unharmed,
    gone_wrong,
    make_scenario,
    summary_of,
)
from tests.helpers.scenario_worlds import entry, run_cases

TWO = ("run.round_depth=2", "run.micro_batch_tokens=104")
AUTO = ("run.round_depth=auto", "run.micro_batch_tokens=104")
LAYOUTS = {"depth 2": TWO, "auto": AUTO, "depth 2, PP2": (*TWO, "parallel.pp_size=2")}
EXACT = ("run.deterministic=true", "run.micro_batch_tokens=160", "run.portion_tokens=60")
SMALLEST, SOME, ILL = "attention", "everything", "mlp"


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenario(tmp_path_factory.mktemp("timed"), num_layers=4)


@pytest.fixture(scope="module")
def runs(scenario: Path) -> Path:
    out, document = scenario.parent / "runs", json.loads(scenario.read_text())
    out.mkdir()
    for job in document["jobs"]:
        alone = {**document, "jobs": [job]}
        scenario.with_name(f"{job['name']}.json").write_text(json.dumps(alone))
    cases = [(name, scenario.name, sets, None) for name, sets in LAYOUTS.items()]
    cases += [
        ("beside one gone wrong", scenario.name, (*TWO, *gone_wrong(ILL)), None),
        ("one sequence a round", f"{SMALLEST}.json", TWO, None),
        ("never stopped", f"{SOME}.json", AUTO, None),
        ("resumed", f"{SOME}.json", (*AUTO, "run.checkpoint_every_steps=2"), (SOME, 5)),
        ("resumed", f"{SOME}.json", (*AUTO, "run.checkpoint_every_steps=2"), None),
        ("exact, together, depth 2", scenario.name, (*EXACT, "run.round_depth=2"), None),
        ("exact, alone, depth 1", f"{SOME}.json", EXACT, None),
    ]
    entries = [
        entry(scenario.with_name(config), out / name, sets, stop=stop)
        for name, config, sets, stop in cases
    ]
    run_cases(2, entries, out / "cases.json")
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_equal_the_oracle(layout: str, runs: Path, scenario: Path) -> None:
    names = [job["name"] for job in JOBS]
    assert_run_equals_oracle(runs / layout, names, scenario)


def test_a_replica_without_sequences_waits_for_the_others(runs: Path, scenario: Path) -> None:
    run = runs / "one sequence a round"
    assert_run_equals_oracle(run, [SMALLEST], scenario)
    assert balance(run)["predicted_busy_share"] == 0.5


def test_a_job_gone_wrong_harms_nobody(runs: Path) -> None:
    names = [job["name"] for job in JOBS]
    ill, healthy = runs / "beside one gone wrong", runs / "depth 2"
    assert_unharmed(ill, healthy, ILL, names)


def test_the_summary_says_how_busy_the_replicas_were(runs: Path) -> None:
    two, auto = balance(runs / "depth 2"), balance(runs / "auto")
    assert (two["depth"], two["shared_out_by"]) == (2, "predicted time")
    assert auto["depth"] in (1, 2, 4)
    assert 0.5 < two["predicted_busy_share"] <= 1
    exact = balance(runs / "exact, alone, depth 1")
    assert (exact["depth"], exact["shared_out_by"]) == (1, "tokens")


@pytest.mark.parametrize(
    ("one", "other"),
    [("never stopped", "resumed"), ("exact, together, depth 2", "exact, alone, depth 1")],
)
def test_bits_are_the_same(one: str, other: str, runs: Path) -> None:
    """After a stop; and of portions, whatever the depth of the rounds and whoever is beside."""
    assert_same_bits(runs / one, runs / other, SOME)


def balance(run: Path) -> dict[str, object]:
    return summary_of(run)["run"]["balance"]
