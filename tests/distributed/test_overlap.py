"""Nano-batches change when things are computed, not what: losses, gradients, neighbours' bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.isolation import CASES, INCIDENTS, NAMES, make_cases
from tests.helpers.launch import REPO
from tests.helpers.scenario import exported, losses, make_scenario
from tests.helpers.standing_world import world

WORKER = Path(__file__).with_name("overlap_worker.py")
TRAIN_WORKER = REPO / "tests" / "helpers" / "train_worker.py"
TWO_PROCESSES = (
    "tp=2,dropout=1",
    "tp=2,sp=1",
    "tp=2,sp=1,recompute=full,dropout=1",
    "tp=2,recompute=selective",
    "tp=2,sp=1,jobs=mlp",
)
"""`jobs=mlp` leaves attention without any adapter."""
SLOW_TWO_PROCESSES = (
    "tp=2,recompute=full",
    "tp=2,sp=1,recompute=selective",
    "tp=2,sp=1,blocks=1",
    "pp=2",
    "pp=2,recompute=selective",
)
FOUR_PROCESSES = (
    "tp=2,pp=2",
    "tp=2,pp=2,sp=1,recompute=full,dropout=1",
)
ONE_STAGE_CANNOT = "pp=2,foreign=1"
LAYOUTS = ("TP2", "TP2+SP")
INCIDENT = "first poisoned, fail"
"""Its job leaves in the first step; its sequences are placeholders from then on."""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config file of the scenario."""
    return make_scenario(tmp_path_factory.mktemp("overlap"), num_layers=4)


def check(scenario: Path, nproc: int, variants: tuple[str, ...]) -> None:
    """Runs variants; each must have been compared."""
    output = world(WORKER, nproc, scenario, *variants)
    assert all(f"{variant}: equal" in output for variant in variants)


def test_losses_and_gradients_are_those_of_one(scenario: Path) -> None:
    check(scenario, 2, TWO_PROCESSES)


def test_all_stages_run_whole_where_one_cannot_be_cut(scenario: Path) -> None:
    """A stage that is cut hands on other rows, in another order, than one that is not expects."""
    output = world(WORKER, 2, scenario, ONE_STAGE_CANNOT)
    assert f"{ONE_STAGE_CANNOT}: equal" in output
    reason = "decoder.layers.0.mlp.linear_fc2 is a MultiLoRARowParallelLinear, which does its own "
    reasons = [line for line in output.splitlines() if reason in line]
    assert all(line.endswith("(pipeline stage 1)") for line in reasons)
    assert len(reasons) >= 2, "each stage says why"


@pytest.mark.slow
def test_losses_and_gradients_in_more_variants(scenario: Path) -> None:
    check(scenario, 2, SLOW_TWO_PROCESSES)


@pytest.mark.slow
def test_losses_and_gradients_in_a_pipeline_of_four(scenario: Path) -> None:
    check(scenario, 4, FOUR_PROCESSES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs of jobs with dropout, in two processes: whole and in nano-batches."""
    root = tmp_path_factory.mktemp("runs")
    make_cases(root)
    cases = [
        {
            "config": str(root / f"{layout} {name}.json"),
            "output_dir": str(root / f"{layout} {name} in {count}"),
            "set": [f"run.nano_batches={count}"],
        }
        for layout in LAYOUTS
        for name, count in (("together", 1), ("together", 3), (INCIDENT, 3))
    ]
    assert all(f"{layout} {INCIDENT}" in CASES[2] for layout in LAYOUTS)
    (root / "cases.json").write_text(json.dumps(cases))
    world(TRAIN_WORKER, 2, root / "cases.json")
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_gives_the_same_adapters(layout: str, runs: Path) -> None:
    whole, cut = (runs / f"{layout} together in {count}" for count in (1, 3))
    told = [json.loads((run / "summary.json").read_text())["run"] for run in (whole, cut)]
    one, three = (run["nano_batches"] for run in told)
    assert {k: v for k, v in one.items() if k != "ran"} == {
        "asked": 1, "count": 1, "controller": None, "time_over_one": None,
    }  # fmt: skip
    assert (three["asked"], three["count"], three["controller"]) == (3, 3, None)
    assert one["ran"].keys() == {"1"}
    assert three["ran"]["3"] > sum(three["ran"].values()) / 2
    assert sum(three["ran"].values()) == one["ran"]["1"] >= told[0]["rounds"]
    for name in NAMES:
        assert losses(cut, name) == pytest.approx(losses(whole, name), rel=1e-5), name
        expected = exported(whole, name, runs / "base")
        for key, value in exported(cut, name, runs / "base").items():
            error = float((value - expected[key]).norm() / expected[key].norm())
            assert error < 1e-4, f"{name} {key}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neighbours_of_an_incident_get_the_same_bits(layout: str, runs: Path) -> None:
    healthy, ill = (runs / f"{layout} {name} in 3" for name in ("together", INCIDENT))
    summary = json.loads((ill / "summary.json").read_text())["jobs"]
    assert summary[INCIDENTS[INCIDENT].job]["status"] == "failed"
    for neighbour in NAMES:
        if neighbour == INCIDENTS[INCIDENT].job:
            continue
        assert losses(ill, neighbour) == losses(healthy, neighbour), neighbour
        weights = [
            load_file(run / "jobs" / neighbour / "adapter" / "adapter_model.safetensors")
            for run in (ill, healthy)
        ]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0]), neighbour
