"""The engine in a program's hands: rounds, evaluation, export, and other jobs on the same base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_cases import run_cases, write_config, zero
from tests.helpers.launch import torchrun
from tests.helpers.scenario import losses, make_scenario

WORKER = Path(__file__).parents[1] / "helpers" / "deepspeed_api_worker.py"
NUM_STEPS = 5


@pytest.fixture(scope="module", params=[1, 3], ids=["ZeRO-1", "ZeRO-3"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what the program left, and every job's run alone."""
    root = tmp_path_factory.mktemp("deepspeed_engine")
    section = json.loads(make_scenario(root).read_text())
    section["base_model"]["path"] = str(root / "base")
    section["jobs"] = section["jobs"][:3]
    for job in section["jobs"]:
        job["max_steps"] = NUM_STEPS
        job["data"] = {key: str(root / value) for key, value in job["data"].items()}
    deepspeed = zero(request.param)
    config = write_config(root / "config.json", deepspeed, section)
    try:
        torchrun(WORKER, 2, config, root / "api")
    except AssertionError:
        if not (root / "api" / "seen.json").is_file():
            raise
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


def test_evaluation_and_export_of_a_job_under_way(root: Path) -> None:
    seen = json.loads((root / "api" / "seen.json").read_text())
    assert seen["evaluated"].keys() == {"everything"}
    exported = load_file(root / "api" / "exported" / "adapter_model.safetensors")
    final = load_file(root / "everything" / "jobs/everything/adapter/adapter_model.safetensors")
    assert exported.keys() == final.keys()
    assert not all(torch.equal(exported[key], value) for key, value in final.items())
