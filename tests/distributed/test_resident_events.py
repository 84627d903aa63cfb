"""One process of a resident super-model: what it tells and writes of each job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.resident_case import Command, Event, Resident, resident
from tests.helpers.scenario import summary_of
from tlora_megatron.training.formats.checkpoint import find_checkpoint
from tlora_megatron.training.metrics import read_metrics


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resident]:
    with resident(tmp_path_factory.mktemp("resident"), 1, {}) as opened:
        yield opened


def coming(gang: Resident, name: str, look: int = 1, **asked: Any) -> list[Command]:
    own = {key: asked.pop(key) for key in list(asked) if key.startswith("checkpoint")}
    asked = {"portion_tokens": 100, "max_steps": 3, **asked}
    return gang.coming(look, name, "attention", body=own, **asked)


def told(events: list[Event], name: str | None) -> list[str]:
    return [kind for kind, job, _ in events if job == name]


def test_a_job_s_life_and_its_summary(gang: Resident) -> None:
    events = gang.run(coming(gang, "life", checkpoint_every_steps=2))
    assert sorted(told(events, "life")) == sorted(
        ["prepared", "joined", *["evaluated"] * 2, *["stepped"] * 3, *["saved"] * 2, "ended"]
    )
    summary = summary_of(gang.job_dir("life"))
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert summary["eval_loss_before"] > 0
    assert Path(summary["adapter"]).is_dir()


def test_a_trial_waits_at_its_rung_and_goes_on_as_if_it_had_not(gang: Resident) -> None:
    leave = [(400, {"kind": "leave", "job": "trial", "behind_step": 2})]
    commands = gang.coming(
        1, "trial", "attention", body={"hold_at": [2]}, portion_tokens=100, max_steps=3
    )
    events = gang.run([*commands, *leave])
    own = [(kind, body.get("step")) for kind, job, body in events if job == "trial"]
    assert ("stepped", 3) not in own
    assert own[-1] == ("left", 2)
    (rung,) = (body for kind, _, body in events if kind == "at_rung")
    assert rung["step"] == 2
    evaluated = [body for kind, _, body in events if kind == "evaluated"][-1]
    assert rung["scores"]["eval_loss"] == evaluated["loss"]
    gang.run(coming(gang, "trial"))
    gang.run(coming(gang, "never"))
    adapters = (gang.job_dir(name) / "adapter" for name in ("trial", "never"))
    held, free = ((folder / "adapter_model.safetensors").read_bytes() for folder in adapters)
    assert held == free


def test_jobs_are_saved_by_time(gang: Resident) -> None:
    events = gang.run(coming(gang, "timed", checkpoint_every_s=1e-6))
    steps = [body["step"] for kind, job, body in events if (kind, job) == ("saved", "timed")]
    assert steps[-1] == 3
    assert len(steps) > 1


def test_steps_are_reported_and_written_before_their_checkpoint(gang: Resident) -> None:
    """Two jobs train on, each saved behind steps of its own."""
    first, second = (coming(gang, n, checkpoint_every_steps=2) for n in ("first", "second"))
    events = gang.run(first + second)
    for name in ("first", "second"):
        steps = [
            (kind, body["step"]) for kind, job, body in events if job == name and "step" in body
        ]
        assert [step for kind, step in steps if kind == "stepped"] == [1, 2, 3]
        for step in (2, 3):
            assert steps.index(("stepped", step)) < steps.index(("saved", step))
        rows = read_metrics(gang.job_dir(name) / "metrics.jsonl")
        assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]


def test_a_checkpoint_that_is_not_finite_is_refused(gang: Resident) -> None:
    commands = coming(gang, "damaged")
    gang.run(commands)
    saved = find_checkpoint(gang.job_dir("damaged") / "checkpoints")
    assert saved is not None
    file = saved.path / "optimizer.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file)
    events = gang.run(commands[:1])
    assert told(events, "damaged") == ["refused"]
    assert f"job 'damaged': {name} must be finite in its checkpoint" in events[-1][2]["error"]


def test_a_broken_job_is_refused_and_the_others_train_on(gang: Resident) -> None:
    (gang.job_dir("broken") / "metrics.jsonl").mkdir(parents=True)
    events = gang.run(coming(gang, "whole") + coming(gang, "broken", 2))
    assert told(events, "broken") == ["refused"]
    assert told(events, "whole")[-1] == "ended"


def test_nothing_more_is_written_of_a_job_that_another_owns(gang: Resident) -> None:
    commands = coming(gang, "lost", max_steps=500, checkpoint_every_steps=5)
    events = gang.run([*commands, (40, {"kind": "take away", "job": "lost"})])
    *_, (kind, _, body) = [event for event in events if event[1] == "lost"]
    assert (kind, body["lost"]) == ("left", True)
    steps = [line["step"] for line in read_metrics(gang.job_dir("lost") / "metrics.jsonl")]
    saved = find_checkpoint(gang.job_dir("lost") / "checkpoints")
    assert saved is None or saved.step <= steps[-1] <= body["step"] < 500
    assert not (gang.job_dir("lost") / "summary.json").exists()


def test_a_job_that_is_done_is_exported_at_once(gang: Resident) -> None:
    gang.run(coming(gang, "twice"))
    adapter = gang.job_dir("twice") / "adapter" / "adapter_model.safetensors"
    before = adapter.read_bytes()
    adapter.unlink()
    events = gang.run(coming(gang, "twice"))
    assert told(events, "twice") == ["prepared", "joined", "evaluated", "ended"]
    assert adapter.read_bytes() == before
