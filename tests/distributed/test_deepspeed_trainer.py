"""Through Hugging Face's Trainer jobs train as without it, and callbacks hear of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from tests.helpers.deepspeed_cases import may_abort_behind, run_cases, write_config, zero
from tests.helpers.scenario import losses, make_scenario
from tests.helpers.standing_world import world

WORKER = Path(__file__).parents[1] / "helpers" / "deepspeed_trainer_worker.py"
NAMES = ("attention", "mlp")
NUM_STEPS = 6
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run without Trainer, one stopped by a callback, and the one that goes on from it."""
    root = tmp_path_factory.mktemp("deepspeed_trainer")
    section = json.loads(make_scenario(root).read_text())
    section["base_model"]["path"] = str(root / "base")
    section["jobs"] = [job for job in section["jobs"] if job["name"] in NAMES]
    for job in section["jobs"]:
        job["max_steps"] = NUM_STEPS
    config = write_config(root / "config.json", zero(3) | AUTO, section)
    entry = {"config": str(config), "output_dir": str(root / "plain"), "set": ()}
    run_cases(2, [entry], root / "cases.json")
    for stop in (["3"], []):
        with may_abort_behind(root / "trainer" / "heard.json"):
            world(WORKER, 2, config, root / "trainer", *stop)
        if stop:
            (root / "trainer" / "heard.json").rename(root / "stopped.json")
    return root


def heard(path: Path) -> dict[str, Any]:
    """Returns the events that the callbacks heard."""
    return json.loads(path.read_text())


def test_jobs_train_as_without_it_across_a_stop(root: Path) -> None:
    for name in NAMES:
        expected = losses(root / "plain", name)
        assert len(expected) == NUM_STEPS
        assert losses(root / "trainer", name) == expected, name


def test_callbacks_hear_of_every_job_and_may_stop(root: Path) -> None:
    stopped, rest = heard(root / "stopped.json"), heard(root / "trainer" / "heard.json")
    assert stopped["rounds"] == 3
    for name in NAMES:
        told = [
            entry[f"loss/{name}"]
            for entry in stopped["logs"] + rest["logs"]
            if f"loss/{name}" in entry
        ]
        assert told == losses(root / "plain", name)
        assert rest["metrics"][f"loss/{name}"] == told[-1]
