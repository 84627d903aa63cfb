"""The engine in a program's hands: rounds, evaluation, export, other jobs; and the oldest
release.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_cases import WORKER, may_abort_behind, run_cases, write_config, zero
from tests.helpers.launch import torchrun
from tests.helpers.scenario import JOBS, adapter_tensors, assert_same_bits, losses, make_scenario
from tests.helpers.scenario_worlds import entry
from tests.helpers.standing_world import world
from tlora_megatron.integrations.deepspeed.known_keys import OLDEST

PROGRAM = Path(__file__).parents[1] / "helpers" / "deepspeed_api_worker.py"
NUM_STEPS = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepspeed_engine")
    section = json.loads(make_scenario(root, JOBS[:3], num_steps=NUM_STEPS).read_text())
    section["base_model"]["path"] = str(root / "base")
    for job in section["jobs"]:
        job["data"] = {key: str(root / value) for key, value in job["data"].items()}
    deepspeed = zero(3)
    config = write_config(root / "config.json", deepspeed, section)
    with may_abort_behind(root / "api" / "seen.json"):
        world(PROGRAM, 2, config, root / "api")
    alone = []
    for job in section["jobs"]:
        path = write_config(root / f"{job['name']}.json", deepspeed, section | {"jobs": [job]})
        alone.append(entry(path, root / job["name"]))
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
        assert_same_bits(root / "api" / "second", root / name, name)


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
    final = adapter_tensors(root / "everything", "everything")
    assert exported.keys() == final.keys()
    assert not all(torch.equal(exported[key], value) for key, value in final.items())


_FOLDER = os.environ.get("TLORA_OLDEST_DEEPSPEED", "")
_VERSION = ".".join(map(str, OLDEST))


@pytest.mark.skipif(
    not Path(_FOLDER).is_absolute(),
    reason=f"needs TLORA_OLDEST_DEEPSPEED to name a folder filled by `pip install --no-deps "
    f"--target FOLDER deepspeed=={_VERSION}`",
)
def test_the_oldest_release_s_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = json.loads(make_scenario(tmp_path).read_text())
    cases = []
    for stage in (0, 1, 2, 3):
        config = write_config(tmp_path / f"{stage}.json", zero(stage), section)
        cases.append(entry(config, tmp_path / f"{stage}"))
    run_cases(2, cases, tmp_path / "cases.json")
    newest = {job["name"]: losses(tmp_path / "0", job["name"]) for job in section["jobs"]}
    for case in cases:
        case["output_dir"] += " oldest"
    monkeypatch.setenv("PYTHONPATH", _FOLDER)
    # Real processes: the forked ones have imported the newest.
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    log = torchrun(WORKER, 2, tmp_path / "cases.json")
    assert "Traceback" not in log
    for case in cases:
        for name, expected in newest.items():
            assert losses(Path(str(case["output_dir"])), name) == pytest.approx(expected, rel=1e-5)
    refused = write_config(tmp_path / "tp.json", {"tensor_parallel": {"autotp_size": 2}}, section)
    (tmp_path / "cases.json").write_text(json.dumps([entry(refused, tmp_path / "tp")]))
    with pytest.raises(AssertionError, match=f"under AutoTP must be .* got {_VERSION}"):
        torchrun(WORKER, 2, tmp_path / "cases.json")
