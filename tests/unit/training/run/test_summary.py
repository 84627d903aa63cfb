"""Readings of data in another process, jobs that go on with other settings, and a run's summary."""

from __future__ import annotations

import json
import pickle
import sys
import threading
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tlora_megatron.config.job import DataSpec, JobSpec, OptimizerSpec, ScheduleSpec
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.formats.checkpoint import Checkpoint
from tlora_megatron.training.run import reading, summary
from tlora_megatron.training.run.preparation import PreparedJob, check_resumption
from tlora_megatron.training.run.reading import Background

SPEC = JobSpec(name="a", data=DataSpec(train="a.jsonl"), batch_size=4, max_steps=20)


def resumed(spec: JobSpec, *, step: int = 6, forget: tuple[str, ...] = ()) -> PreparedJob:
    """A job with a checkpoint of `SPEC`; `forget` are settings that its version did not have."""
    saved: dict[str, Any] = json.loads(json.dumps(asdict(SPEC)))
    for key in forget:
        del saved["optimizer"][key]
    data: Any = None
    return PreparedJob(
        spec=spec,
        data=data,
        plan=BatchPlan.for_job(spec, 16),
        checkpoint=Checkpoint(path=Path("c"), state={"job": saved, "progress": {"step": step}}),
        imported=None,
    )


def test_one_line_names_every_old_and_new_value(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = OptimizerSpec(lr=0.5, betas=(0.8, 0.9), weight_decay=0.1)
    schedule = ScheduleSpec(name="cosine", warmup_steps=2)
    check_resumption(resumed(replace(SPEC, max_steps=9, optimizer=optimizer, schedule=schedule)))
    (record,) = caplog.records
    assert record.getMessage() == (
        "job a goes on from step 6 with other settings: max_steps 9 instead of 20, "
        "optimizer.lr 0.5 instead of 0.0002, optimizer.betas [0.8, 0.9] instead of [0.9, 0.999], "
        "optimizer.weight_decay 0.1 instead of 0.0, schedule.name cosine instead of constant, "
        "schedule.warmup_steps 2 instead of 0"
    )


def test_a_job_at_its_end_is_said_to_stay_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    check_resumption(resumed(replace(SPEC, optimizer=OptimizerSpec(lr=0.5)), step=20))
    (record,) = caplog.records
    assert record.getMessage() == (
        "job a has done its 20 steps; other settings than theirs have no effect: "
        "optimizer.lr 0.5 instead of 0.0002"
    )


def test_nothing_is_said_of_same_or_unknown_settings(caplog: pytest.LogCaptureFixture) -> None:
    check_resumption(resumed(SPEC))
    check_resumption(resumed(SPEC, step=20))
    check_resumption(resumed(replace(SPEC, optimizer=OptimizerSpec(lr=2e-4)), forget=("lr",)))
    check_resumption(replace(resumed(replace(SPEC, max_steps=1)), checkpoint=None))
    assert not caplog.records


def test_an_end_behind_which_the_job_already_is_is_refused() -> None:
    rule = r"max_steps of job 'a' must be at least the 6 steps that "
    with pytest.raises(ValueError, match=rule):
        check_resumption(resumed(replace(SPEC, max_steps=5)))
    epochs = replace(SPEC, max_steps=None, epochs=1)
    rule = r"epochs of job 'a' must .*, got epochs 1, which are 4 st"
    with pytest.raises(ValueError, match=rule):
        check_resumption(resumed(epochs))


@pytest.mark.parametrize(
    ("was", "given", "named"),
    [
        ({}, {"init_from": "/x"}, ["init_from /x"]),
        ({"init_from": "/x"}, {"init_from": "/y"}, ["init_from /y"]),
        ({"init_from": "/x"}, {"init_from": "/x"}, []),
        ({"init_from": "/x"}, {}, []),
        ({}, {"resume_from": "/other"}, ["resume_from /other"]),
        ({}, {"resume_from": "/run"}, []),
        ({}, {"resume_from": "/run", "init_from": "/x"}, ["init_from /x"]),
    ],
)
def test_a_start_that_the_checkpoint_overrules_is_told(
    caplog: pytest.LogCaptureFixture, was: dict[str, str], given: dict[str, str], named: list[str]
) -> None:
    job = resumed(replace(SPEC, **given))  # type: ignore[arg-type]
    assert job.checkpoint is not None
    job.checkpoint.state["job"].update(was)
    check_resumption(replace(job, checkpoint=replace(job.checkpoint, path=Path("/run/c"))))
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" of job")[0] for text in told] == named
    assert all("has no effect: it goes on from its checkpoint /run/c" in text for text in told)


def test_the_version_of_megatron_core_is_that_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    assert summary.versions()["megatron-core"] == version("megatron-core")
    checkout = SimpleNamespace(__version__="0.99.0")
    monkeypatch.setitem(sys.modules, "megatron.core", checkout)  # type: ignore[arg-type]
    assert summary.versions()["megatron-core"] == "0.99.0"


def test_the_balance_of_replicas_is_told_with_what_was_measured() -> None:
    timing = SimpleNamespace(depth="auto", source="a test", in_seconds=True, cp_rates=None)
    model = SimpleNamespace(
        timing=timing, rule=None, busy=SimpleNamespace(share=0.75),
        correction=SimpleNamespace(over_predicted=1.1),
    )  # fmt: skip
    loop: Any = SimpleNamespace(super_model=model)
    assert summary._balance(loop) == {
        "round_depth": "auto", "shared_out_by": "tokens", "depth": 1, "predicted_busy_share": 0.75,
        "speeds_from": "a test", "measured_over_predicted": 1.1,
    }  # fmt: skip
    model.timing = None
    assert summary._balance(loop) is None


def sequence(length: int) -> TokenSequence:
    tokens = np.arange(length, dtype=np.int32) + 7 * length
    return TokenSequence(tokens, tokens % 3 == 1)


def test_sent_readings_are_the_same() -> None:
    train = tuple(map(sequence, (3, 1, 8)))
    data = JobData(train=train, eval=(), num_truncated=2, num_dropped=1)
    sent = pickle.dumps([reading._joined(one) for one in (data, ValueError("line 3"))])
    whole, failed = pickle.loads(sent)
    assert str(failed) == "line 3"
    assert isinstance(whole, JobData)
    assert whole.fingerprint == data.fingerprint
    assert [len(s.tokens) for s in whole.train] == [3, 1, 8]
    assert (len(whole.eval), whole.num_truncated, whole.num_dropped) == (0, 2, 1)


def test_background_work_can_be_waited_for_in_part() -> None:
    go = threading.Event()
    work = Background(go.wait)
    with pytest.raises(TimeoutError):
        work.result(0.01)
    go.set()
    assert work.result() is True


def test_an_error_of_background_work_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        Background(lambda: 1 // 0).result()
