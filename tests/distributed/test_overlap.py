"""Nano-batches change when things are computed, not what: losses and gradients of a round.

Whole runs in nano-batches: test_isolation.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.scenario import make_scenario
from tests.helpers.standing_world import world

WORKER = Path(__file__).with_name("overlap_worker.py")
TWO_PROCESSES = (
    "tp=2,dropout=1", "tp=2,sp=1", "tp=2,sp=1,recompute=full,dropout=1", "tp=2,recompute=selective",
    "tp=2,sp=1,jobs=mlp", "pp=2,recompute=selective",
)  # fmt: skip
"""`jobs=mlp` leaves attention without any adapter."""
ONE_STAGE_CANNOT = "pp=2,foreign=1"


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenario(tmp_path_factory.mktemp("overlap"), num_layers=4)


def check(scenario: Path, nproc: int, variants: tuple[str, ...]) -> None:
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
