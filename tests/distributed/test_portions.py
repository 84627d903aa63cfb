"""With `run.portion_tokens` a job in company has the bits it has alone, where that is promised.

Other layouts are in `test_deterministic.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scenario import have_same_adapters, losses, make_scenario
from tests.helpers.scenario_worlds import Case, World, worlds

JOB = "everything"
PORTIONS = ("run.portion_tokens=100",)
TP2 = ("parallel.tp_size=2",)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "TP2 fold": (*TP2, "parallel.lora_sharding=fold"),
    "TP2 rank_exchange": (*TP2, "parallel.lora_sharding=rank_exchange", "run.recompute=full"),
    "DP2": (),
}
SHARED_OUT = "DP2 without portions"


@pytest.fixture(scope="module")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Trains all jobs, and one alone, in every layout."""
    config = make_scenario(tmp_path_factory.mktemp("portions"))
    document = json.loads(config.read_text())
    for job in document["jobs"]:
        job["max_steps"] = 6
        del job["data"]["eval"]
    config.write_text(json.dumps(document))
    alone = config.with_name("alone.json")
    jobs = [job for job in document["jobs"] if job["name"] == JOB]
    alone.write_text(json.dumps({**document, "jobs": jobs}))
    settings = {name: (*layout, *PORTIONS) for name, layout in LAYOUTS.items()} | {SHARED_OUT: ()}
    cases = {
        f"{name} {company}": Case(path, overrides)
        for name, overrides in settings.items()
        for company, path in (("together", config), ("alone", alone))
    }
    return worlds(config.parent, lambda _: cases)


def have_equal_bits(root: Path, name: str) -> bool:
    """True if the job's losses and weights are those it has alone."""
    runs = [root / f"{name} {company}" for company in ("together", "alone")]
    return have_same_adapters(*runs, JOB) and losses(runs[0], JOB) == losses(runs[1], JOB)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_job_alone_has_the_bits_of_the_job_in_company(layout: str, run_world: World) -> None:
    assert have_equal_bits(run_world(2), layout)


def test_room_shared_fairly_gives_other_bits(run_world: World) -> None:
    """Or the jobs here would never meet in one micro-batch."""
    assert not have_equal_bits(run_world(2), SHARED_OUT)
