"""SIGKILL at random moments of asynchronous saves: the run ends with the bits of one without.

One process, killed at each moment that counts: test_resume. `TLORA_KILLS=30` kills each run so many
times, in one layout more, and takes minutes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.killed_worker import Killed, outlive
from tests.helpers.scenario import JOBS, make_scenario, records
from tests.helpers.scenario_worlds import entry
from tests.helpers.standing_world import world

WORKER = Path(__file__).parents[1] / "helpers" / "killed_worker.py"
NAMES = tuple(job["name"] for job in JOBS)
KILLS = int(os.environ.get("TLORA_KILLS", "0"))
PORTIONS = ["run.micro_batch_tokens=512", "run.portion_tokens=256"]
"""A resumed job meets other neighbours; its own sequences are cut the same nevertheless."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenario's four jobs with checkpoints every two steps."""
    root, every = tmp_path_factory.mktemp("killed saves"), {"checkpoint_every_steps": 2}
    return make_scenario(root, num_steps=8, dropout={"everything": 0.2}, run=every)


def life_of(config: Path, name: str, *overrides: str, seed: int | None = 0) -> dict[str, Any]:
    """A life in `config`'s folder, see the worker."""
    return entry(config, config.parent / name, [*PORTIONS, *overrides], seed=seed)


def assert_same_bits(output_dir: Path, whole: Path) -> None:
    """Metrics but times, checkpoints and adapters, byte by byte."""
    for name in NAMES:
        assert records(output_dir, name) == records(whole, name), f"{output_dir}: {name}"
        files = sorted((whole / "jobs" / name).rglob("*.safetensors"))
        assert len(files) == 5
        for file in files:
            mine = output_dir / file.relative_to(whole)
            assert mine.read_bytes() == file.read_bytes(), mine
        assert not [path for path in (output_dir / "jobs" / name).rglob(".*") if path.is_dir()]


@pytest.mark.parametrize("layout", ["TP2", "DP2"] if KILLS else ["TP2"])
def test_two_processes(config: Path, layout: str) -> None:
    overrides = ("parallel.tp_size=2",) if layout == "TP2" else ()

    def run(life: dict[str, Any]) -> None:
        try:
            file = config.with_name(f"{layout}.json")
            file.write_text(json.dumps(life))
            world(WORKER, 2, file)
        except AssertionError as error:
            if life["seed"] is None or "SIGKILL" not in str(error):
                raise
            raise Killed from error

    outlive(run, life_of(config, f"whole {layout}", *overrides), 0)
    outlive(run, life_of(config, f"killed {layout}", *overrides, seed=2000), KILLS or 2)
    for output_dir in config.parent.glob(f"killed {layout}[0-9]*"):
        assert_same_bits(output_dir, config.parent / f"whole {layout}0")
