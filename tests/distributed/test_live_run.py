"""Jobs are added to a run of `tlora train` and cancelled in it; the others' bits stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.scenario import make_scenario, summary_of
from tests.helpers.scenario_worlds import entry
from tests.helpers.standing_world import world
from tlora_megatron.config.load import load_config
from tlora_megatron.config.sections import job_to_dict

STEPS = 10
LORA: dict[str, Any] = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
JOBS = [{"name": n, "lora": LORA, "batch_size": 4, "seed": i} for i, n in enumerate("abc")]
TRAIN = ("run.micro_batch_tokens=512", "run.portion_tokens=256", "parallel.tp_size=2")
KEEPS_BITS = not torch.cuda.is_available()
"""Two runs of fp32 on GPUs do not have the same bits, alone or beside others."""


def _losses(out: Path, name: str) -> list[Any]:
    lines = (out / "jobs" / name / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss"]) for r in map(json.loads, lines) if "loss" in r]


def _adapter(out: Path, name: str) -> bytes:
    return (out / "jobs" / name / "adapter" / "adapter_model.safetensors").read_bytes()


def _assert_same(found: list[Any], expected: list[Any]) -> None:
    if KEEPS_BITS:
        assert found == expected
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    config = make_scenario(folder, JOBS, num_steps=STEPS)
    late = job_to_dict(load_config(config).jobs[2])
    document = json.loads(config.read_text())
    config.write_text(json.dumps(document | {"jobs": document["jobs"][:2]}))
    wide = {**late, "name": "wide", "lora": {**late["lora"], "target_modules": ["up_proj"]}}
    requests = [
        (2, {"kind": "cancel", "job": "nobody"}),
        (2, {"kind": "add", "job": "a", "document": {**late, "name": "a"}}),
        (2, {"kind": "add", "job": "wide", "document": wide}),
        (2, {"kind": "add", "job": "c", "document": late}),
        (2, {"kind": "cancel", "job": "b"}),
        (2, {"kind": "cancel", "job": "b"}),
    ]
    cases = [
        entry(config, folder / "changed", TRAIN, requests=requests),
        entry(config, folder / "alone", TRAIN, requests=[]),
        # Resumed: all has ended or is out.
        entry(config, folder / "changed", TRAIN, requests=[]),
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    world("tests/helpers/live_run_worker.py", 2, folder / "cases.json")
    return folder


def test_a_job_joins_and_one_leaves_and_the_rest_keep_their_bits(runs: Path) -> None:
    changed, alone = runs / "changed", runs / "alone"
    nobody, taken, targets, joined, left, twice = json.loads((changed / "answers.json").read_text())
    assert nobody["error"].startswith("the job to cancel must be one that trains: a, b; got")
    assert taken["error"] == "job 'a' must have a name of its own, got that of a job of the run"
    assert "must be among those that this super-model was opened for" in targets["error"]
    assert (joined["from_step"], joined["num_steps"]) == (0, STEPS)
    assert 0 < left["step"] < STEPS
    assert twice["error"] == (
        "job 'b' must still train to be cancelled, got one that is cancelled at step "
        f"{left['step']}"
    )
    _assert_same(_losses(changed, "a"), _losses(alone, "a"))
    assert _adapter(changed, "a") == _adapter(alone, "a") or not KEEPS_BITS
    assert [step for step, _ in _losses(changed, "c")] == list(range(1, STEPS + 1))
    _assert_same(_losses(changed, "b"), _losses(alone, "b")[: left["step"]])
    assert [job["name"] for job in json.loads((changed / "config.json").read_text())["jobs"]] == [
        "a",
        "c",
    ]
    summary = summary_of(changed)["jobs"]
    assert {name: job["status"] for name, job in summary.items()} == {
        "a": "finished",
        "c": "finished",
    }
    assert not (changed / ".live").exists()
