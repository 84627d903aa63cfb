"""Optimizer states that replicas divide: the bits of whole ones, and checkpoints for any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scenario import JOBS, make_scenario, records
from tests.helpers.scenario_worlds import entry, run_cases
from tests.helpers.shard_optimizer_worker import LAYOUTS
from tests.helpers.standing_world import world

SHARDED, WHOLE = "parallel.shard_optimizer=true", "parallel.shard_optimizer=false"
NAMES = tuple(job["name"] for job in JOBS)
STEPS = 6
WORKER = Path(__file__).parents[1] / "helpers" / "shard_optimizer_worker.py"


def test_steps_have_the_bits_of_whole_states() -> None:
    log = world(WORKER, 4)
    for name in LAYOUTS[4]:
        assert f"the same bits in {name}" in log


def saved(output_dir: Path, name: str) -> dict[str, bytes]:
    last = output_dir / "jobs" / name / "checkpoints" / f"step_{STEPS:08d}"
    adapter = output_dir / "jobs" / name / "adapter" / "adapter_model.safetensors"
    return {path.name: path.read_bytes() for path in (*last.glob("*.safetensors"), adapter)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of deterministic runs of two processes: whole, sharded, and both by turns.

    The last one begins a fourth time on one process, where there is nothing to divide.
    """
    config = make_scenario(tmp_path_factory.mktemp("shard_optimizer"), num_steps=STEPS)
    root = config.parent

    def life(name: str, shards: str, stop: int | None = None) -> dict[str, Any]:
        overrides = ("run.deterministic=true", "run.checkpoint_every_steps=1", shards)
        return entry(config, root / name, overrides, stop=stop and ("everything", stop))

    lives = [life("whole", WHOLE), life("sharded", SHARDED)]
    lives += [life("turns", SHARDED, 2), life("turns", WHOLE, 4), life("turns", SHARDED)]
    run_cases(2, [*lives, life("elsewhere", SHARDED, 3)], root / "two.json")
    log = run_cases(1, [life("elsewhere", SHARDED)], root / "one.json")
    assert "parallel.shard_optimizer has no effect with one replica" in log
    return root


@pytest.mark.parametrize("other", ["sharded", "turns"])
def test_runs_have_the_same_bytes_however_often_the_key_changes(runs: Path, other: str) -> None:
    for name in NAMES:
        assert records(runs / other, name) == records(runs / "whole", name)
        ours = saved(runs / other, name)
        assert len(ours) == 3
        assert ours == saved(runs / "whole", name), name


def test_a_checkpoint_of_slices_is_taken_up_by_another_number_of_replicas(runs: Path) -> None:
    for name in NAMES:
        pairs = zip(records(runs / "elsewhere", name), records(runs / "whole", name), strict=True)
        for ours, theirs in pairs:
            assert ours == pytest.approx(theirs, rel=1e-5), name
