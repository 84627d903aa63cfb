"""Through Hugging Face's Trainer jobs train as without it, and it behaves as a Trainer does,
with its own files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed", reason="needs deepspeed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from tests.helpers.deepspeed_cases import may_abort_behind, run_cases, write_config, zero
from tests.helpers.deepspeed_files import FILES
from tests.helpers.scenario import JOBS, NUM_STEPS, losses, make_scenario
from tests.helpers.scenario_worlds import entry
from tests.helpers.standing_world import world
from tlora_megatron.training.metrics import read_metrics

WORKER = Path(__file__).parents[1] / "helpers" / "deepspeed_trainer_worker.py"
NAMES = ("attention", "mlp")
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepspeed_trainer")
    section = json.loads(make_scenario(root, JOBS[:2]).read_text())
    section["base_model"]["path"] = str(root / "base")
    config = write_config(root / "config.json", zero(3) | AUTO, section)
    run_cases(2, [entry(config, root / "plain")], root / "cases.json")
    for stop in (["3"], []):
        with may_abort_behind(root / "trainer" / "heard.json"):
            world(WORKER, 2, config, root / "trainer", *stop)
        if stop:
            (root / "trainer" / "heard.json").rename(root / "stopped.json")
    return root


def heard(path: Path) -> dict[str, Any]:
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


OWN_RATE = 1e-3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("trainer_files")
    jobs = json.loads(make_scenario(runs, JOBS[:2], num_layers=1).read_text())["jobs"]
    for job, size in zip(jobs, (3, 6), strict=True):
        del job["optimizer"], job["schedule"], job["max_steps"]
        job["batch_size"] = size
    jobs[1]["optimizer"] = {"lr": OWN_RATE}
    tlora = {"run": {"micro_batch_tokens": 2048, "tensorboard": False}, "jobs": jobs}
    for stage in (2, 3):
        document = FILES[f"Hugging Face, ds_config_zero{stage}.json"] | {"tlora": tlora}
        (runs / f"stage{stage}.json").write_text(json.dumps(document))
    with may_abort_behind(runs / "seen.json"):
        world(WORKER, 1, runs)
    return runs


@pytest.fixture
def seen(runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / "seen.json").read_text())
    return found


def jobs_of(runs: Path, name: str) -> list[dict[str, Any]]:
    document = json.loads((runs / name / "config.json").read_text())
    return list(document["jobs"])


def rounds_of(events: list[list[Any]], name: str) -> list[int]:
    """The rounds after which callbacks heard of an event."""
    return [event[1] for event in events if event[0] == name]


def test_arguments_are_the_jobs_defaults(runs: Path) -> None:
    attention, mlp = jobs_of(runs, "stage3")
    assert (attention["optimizer"]["lr"], mlp["optimizer"]["lr"]) == (4e-3, OWN_RATE)
    for job in (attention, mlp):
        assert job["optimizer"]["weight_decay"] == 0.1
        assert (job["schedule"]["name"], job["schedule"]["warmup_ratio"]) == ("cosine", 0.25)
        assert (job["epochs"], job["seed"]) == (2, 5)
    rates = [
        line["lr"] for line in read_metrics(runs / "stage3/jobs/mlp/metrics.jsonl") if "lr" in line
    ]
    assert rates[:3] == [0.0, OWN_RATE / 2, OWN_RATE], "a quarter of six steps, rounded up"


def test_callbacks_hear_of_epochs_checkpoints_and_evaluations(seen: dict[str, Any]) -> None:
    """18 rows in batches of 3 and 6: the slower job makes 6 rounds an epoch, 12 in all."""
    events, rounds = seen["stage3"]["events"], seen["stage3"]["rounds"]
    assert rounds == 12
    assert rounds_of(events, "epoch_begin")[:2] == [0, 6]
    assert rounds_of(events, "epoch_end")[:2] == [6, 12]
    assert rounds_of(events, "save")[:1] == [2], "asked for by a callback"
    assert 12 in rounds_of(events, "save"), "at the last job's end"
    assert rounds_of(events, "evaluate")[:2] == [0, 0], "asked for, then before training"
    assert {6, 12} <= set(rounds_of(events, "evaluate")), "each epoch and the jobs' ends"
    steps = [event for event in events if event[0] == "step_end"]
    assert [event[2] for event in steps] == sorted(event[2] for event in steps)
    assert (steps[-1][2], steps[-1][3]) == (2.0, rounds)


def test_evaluation_equals_the_job_s_own(runs: Path, seen: dict[str, Any]) -> None:
    before, after = seen["stage3"]["before"], seen["stage3"]["after"]
    for name in NAMES:
        lines = read_metrics(runs / f"stage3/jobs/{name}/metrics.jsonl")
        losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
        assert losses[max(losses)] == after[f"eval_{name}_loss"]
        assert before[f"eval_{name}_loss"] != after[f"eval_{name}_loss"]
    assert after["eval_loss"] == sum(after[f"eval_{name}_loss"] for name in NAMES) / 2


def test_adapters_are_saved_where_they_are_asked_for(runs: Path) -> None:
    for name in NAMES:
        file = "adapter_model.safetensors"
        own, saved = (
            load_file(runs / d / file) for d in (f"stage3/jobs/{name}/adapter", f"saved/{name}")
        )
        assert own.keys() == saved.keys()
        assert all(torch.equal(own[key], value) for key, value in saved.items())
        assert (runs / "stopped" / name / file).is_file(), "of a job under way"


def test_a_run_that_has_ended_has_nothing_left_to_do(runs: Path, seen: dict[str, Any]) -> None:
    assert seen["stage3"]["again"] == 0
    metrics = json.loads((runs / "stage3" / "train_results.json").read_text())
    assert metrics["train_loss"] == seen["stage3"]["metrics"]["train_loss"]
    assert (runs / "stage3" / "trainer_state.json").is_file()


def test_early_stopping_stops_and_saves(seen: dict[str, Any]) -> None:
    stopped = seen["stage2"]
    assert stopped["rounds"] == 3, "the first evaluation behind the one before training"
    assert rounds_of(stopped["events"], "evaluate")[:2] == [0, 3]
    assert 3 in rounds_of(stopped["events"], "save")
    history = stopped["history"]
    assert [entry["step"] for entry in history if "eval_loss" in entry][:2] == [0, 3]
    losses = [entry["eval_mlp_loss"] for entry in history if "eval_mlp_loss" in entry]
    assert stopped["best"] == min(losses), "less is better, by the metric's name"
    logged = [entry for entry in history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2]
    assert {"loss/mlp", "learning_rate/mlp", "grad_norm/mlp", "epoch"} <= logged[0].keys()
    assert stopped["after"].keys() >= {"eval_loss", "eval_mlp_loss", "eval_mlp_exact_match"}
