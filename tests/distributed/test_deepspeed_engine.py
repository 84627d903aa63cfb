"""The engine in a program's hands: rounds, evaluation, export, and other jobs on the same base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_cases import may_abort_behind, run_cases, write_config, zero
from tests.helpers.scenario import losses, make_scenario
from tests.helpers.standing_world import world

WORKER = Path(__file__).parents[1] / "helpers" / "deepspeed_api_worker.py"
NUM_STEPS = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what the program left, and every job's run alone."""
    root = tmp_path_factory.mktemp("deepspeed_engine")
    section = json.loads(make_scenario(root).read_text())
    section["base_model"]["path"] = str(root / "base")
    section["jobs"] = section["jobs"][:3]
    for job in section["jobs"]:
        job["max_steps"] = NUM_STEPS
        job["data"] = {key: str(root / value) for key, value in job["data"].items()}
    deepspeed = zero(3)
    config = write_config(root / "config.json", deepspeed, section)
    with may_abort_behind(root / "api" / "seen.json"):
        world(WORKER, 2, config, root / "api")
    alone = []
    for job in section["jobs"]:
        path = write_config(root / f"{job['name']}.json", deepspeed, section | {"jobs": [job]})
        alone.append({"config": str(path), "output_dir": str(root / job["name"]), "set": ()})
    run_cases(2, alone, root / "cases.json")
    return root


def test_rounds_train_every_job_to_its_end(root: Path) -> None:
    seen = json.loads((root / "api" / "seen.json").read_text())
    assert {name: seen["steps"].count(name) for name in ("attention", "mlp")} == {
        "attention": NUM_STEPS,
        "mlp": NUM_STEPS,
    }
    for name in ("attention", "mlp"):
        assert losses(root / "api" / "first", name) == losses(root / name, name)


def test_installed_jobs_train_as_if_alone_and_go_on_where_they_were(root: Path) -> None:
    seen = json.loads((root / "api" / "seen.json").read_text())
    assert seen["resumed_at"] == [0, 3]
    for name in ("everything", "attention"):
        assert losses(root / "api" / "second", name) == losses(root / name, name)
        file = f"jobs/{name}/adapter/adapter_model.safetensors"
        ours, alone = load_file(root / "api" / "second" / file), load_file(root / name / file)
        assert all(torch.equal(ours[key], value) for key, value in alone.items()), name


def test_wrong_jobs_are_refused_and_the_present_ones_stay(root: Path) -> None:
    """They stay: the job under way has made another step since, and is evaluated and resumed."""
    seen = json.loads((root / "api" / "seen.json").read_text())
    name, twice, _ = seen["refused"]
    assert "jobs[0].name must" in name
    assert "unique names, got 'attention' 2 times" in twice


def test_jobs_that_do_not_fit_the_base_leave_none(root: Path) -> None:
    seen = json.loads((root / "api" / "seen.json").read_text())
    assert "job 'everything': lora.rank must be 8 as in its checkpoint" in seen["refused"][2]
    assert seen["left"] == []


def test_evaluation_and_export_of_a_job_under_way(root: Path) -> None:
    seen = json.loads((root / "api" / "seen.json").read_text())
    assert seen["evaluated"].keys() == {"everything"}
    exported = load_file(root / "api" / "exported" / "adapter_model.safetensors")
    final = load_file(root / "everything" / "jobs/everything/adapter/adapter_model.safetensors")
    assert exported.keys() == final.keys()
    assert not all(torch.equal(exported[key], value) for key, value in final.items())
