"""Block-diagonal jobs get what PEFT's own block-diagonal training gives them, in every layout.

All runs of one world size share one set of processes; each is a whole `train_run` beside standard
jobs, checked by the files it leaves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.block_jobs import BLOCK_JOBS as JOBS
from tests.helpers.scenario import (
    assert_run_equals_oracle,
    assert_unharmed,
    gone_wrong,
    make_scenario,
)
from tests.helpers.scenario_worlds import Case, Life, World, layout_params, live, worlds
from tests.helpers.session import further
from tests.helpers.standing_world import world
from tests.helpers.train_worker import starts

COUNTER = Path(__file__).parents[1] / "helpers" / "block_collectives_worker.py"


NAMES = tuple(job["name"] for job in JOBS)
TP2_SP = ("parallel.tp_size=2", "parallel.sequence_parallel=true")
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one process": (), "full recompute": ("run.recompute=full",)},
    2: {
        "TP2": ("parallel.tp_size=2",),
        "TP2+SP": TP2_SP,
        "TP2+SP nano-batches": (*TP2_SP, "run.nano_batches=2"),
        "PP2": ("parallel.pp_size=2",),
        "DP2": (),
        "CP2": ("parallel.cp_size=2",),
        **further({"TP2+SP full recompute": (*TP2_SP, "run.recompute=full")}),
    },
    4: {
        "TP4": ("parallel.tp_size=4",),
        "TP4+SP": ("parallel.tp_size=4", "parallel.sequence_parallel=true"),
        "TP2xPP2": ("parallel.tp_size=2", "parallel.pp_size=2"),
    },
}
INCIDENTS = ("standard", "eight")


def jobs_of(layout: str) -> tuple[str, ...]:
    """Two blocks cannot be four ranks'."""
    return NAMES[:-1] if "TP4" in layout else NAMES


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config file of the scenario; beside it one without the job that TP 4 cannot cut."""
    path = make_scenario(tmp_path_factory.mktemp("blocks"), JOBS)
    document = json.loads(path.read_text())
    jobs = [job for job in document["jobs"] if job["name"] in NAMES[:-1]]
    path.with_name("TP4.json").write_text(json.dumps({**document, "jobs": jobs}))
    return path


@pytest.fixture(scope="module")
def run_world(scenario: Path) -> World:
    return worlds(scenario.parent, lambda size: _cases(scenario, size))


def _cases(scenario: Path, world_size: int) -> dict[str, Case]:
    cases = {}
    for name, overrides in LAYOUTS[world_size].items():
        config = scenario.with_name("TP4.json") if "TP4" in name else scenario
        cases[name] = Case(config, overrides)
    if world_size > 2:
        return cases
    layout = TP2_SP if world_size == 2 else ()
    for name in INCIDENTS:
        cases[f"{name} ill"] = Case(scenario, (*layout, *gone_wrong(name)))
    return cases


@pytest.mark.parametrize(("world_size", "layout"), layout_params(LAYOUTS))
def test_losses_and_weights_equal_peft_s_own(layout: str, output_dir: Path, scenario: Path) -> None:
    assert_run_equals_oracle(output_dir, jobs_of(layout), scenario)


@pytest.mark.parametrize("ill", INCIDENTS)
@pytest.mark.parametrize(("world_size", "layout"), [(1, "one process"), (2, "TP2+SP")])
def test_jobs_beside_one_gone_wrong_get_the_same_bits(
    world_size: int, layout: str, ill: str, run_world: World
) -> None:
    root = run_world(world_size)
    assert_unharmed(root / f"{ill} ill", root / layout, ill, NAMES)


def test_between_layouts(scenario: Path, tmp_path: Path) -> None:
    lives = (
        Life(2, ("parallel.tp_size=2",), ("four", 3)),
        Life(1, (), ("four", 5)),
        Life(2, TP2_SP, None),
    )
    out = live(scenario, tmp_path, lives)
    assert [steps["four"] for steps in starts(out)] == [0, 2, 4]
    assert_run_equals_oracle(out, NAMES, scenario)


def test_nothing_is_exchanged_for_block_diagonal_jobs(tmp_path: Path) -> None:
    """Passes have the frozen model's collectives, and the step no sum over TP."""
    world(COUNTER, 2, tmp_path / "counts.json")
    counts = json.loads((tmp_path / "counts.json").read_text())
    for layout, mixes in counts.items():
        frozen, blocks, standard = (mixes[m] for m in ("frozen", "block_diagonal", "standard"))
        assert frozen["layers"], layout
        assert blocks["layers"] == frozen["layers"], layout
        assert blocks["step"] == {"c10d::allreduce_": 1}, "one of all losses and norms"
        assert standard["step"] == {"c10d::allreduce_": 3}, "and a sum over TP for each job"
        # Standard jobs beside them do not exchange dS either; their replicated factors are summed.
        assert mixes["both"] == {"layers": frozen["layers"], "step": {"c10d::allreduce_": 2}}
    assert counts["TP+SP"]["standard"]["layers"]["c10d::allreduce_"] == 4, "dS of both layers"
