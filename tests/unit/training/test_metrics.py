"""Metrics lines hold each step once, as strict JSON, through resumes, kills and bad numbers."""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.launch import HANG_S, imported
from tlora_megatron.training import metrics
from tlora_megatron.training.metrics import JobMetrics, read_metrics, write_summary

INF, NAN = float("inf"), float("nan")


def open_metrics(out: Path, *, name: str = "gsm8k", **settings: Any) -> JobMetrics:
    return JobMetrics(out, name, **{"tensorboard": False, "wandb_project": None, **settings})


def log_steps(job: JobMetrics, begin: int, end: int, *, loss: float = 2.0) -> None:
    for step in range(begin, end):
        job.log_step(step, loss, 0.5, 1e-3, 40, 100, 0.25)


def disk_full(*_: object, **__: object) -> None:
    raise OSError(28, "disk full")


def strict(text: str) -> list[dict]:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_lines_hold_the_documented_keys(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as job:
        job.log_eval(0, 4.0, 0.0)
        job.log_step(1, 2.5, 0.75, 1e-3, 40, 100, 0.25)
        job.log_eval(1, 3.0, None)
    path = tmp_path / "jobs" / "gsm8k" / "metrics.jsonl"
    assert job.path == path
    step = {"step": 1, "loss": 2.5, "grad_norm": 0.75, "lr": 1e-3}
    assert strict(path.read_text()) == [
        {"step": 0, "eval_loss": 4.0, "eval_exact_match": 0.0},
        step | {"target_tokens": 40, "tokens": 100, "time_s": 0.25},
        {"step": 1, "eval_loss": 3.0, "eval_exact_match": None},
    ]
    assert read_metrics(path) == strict(path.read_text())


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_is_null_and_flagged(tmp_path: Path, value: float) -> None:
    with open_metrics(tmp_path) as job:
        job.log_step(1, value, 0.5, 1e-3, 40, 100, 0.25, skipped=True)
        job.log_step(2, 1.0, 0.5, 1e-3, 40, 100, 0.25)
        job.log_eval(2, value, 0.5)
    bad, good, evaluation = strict(job.path.read_text())
    assert (bad["loss"], bad["nonfinite"], bad["skipped"]) == (None, True, True)
    assert bad["grad_norm"] == 0.5
    assert not {"nonfinite", "skipped"} & good.keys()
    assert (evaluation["eval_loss"], evaluation["nonfinite"]) == (None, True)


def test_resume_repeats_no_step(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as job:
        job.log_eval(0, 4.0, 0.0)
        log_steps(job, 1, 6, loss=1.0)
        job.log_eval(5, 3.0, 0.1)
        log_steps(job, 6, 9, loss=1.0)
        job.log_eval(8, 2.0, 0.2)
    with job.path.open("a") as file:
        file.write('{"step": 9, "lo')
    with open_metrics(tmp_path, resume_step=5) as job:
        job.log_eval(5, 3.0, 0.1)
        log_steps(job, 6, 11, loss=2.0)
        job.log_eval(8, 2.5, 0.2)
    records = read_metrics(job.path)
    steps = [(r["step"], r["loss"]) for r in records if "loss" in r]
    assert steps == [(s, 1.0 if s <= 5 else 2.0) for s in range(1, 11)]
    assert [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r] == [
        (0, 4.0),
        (5, 3.0),
        (8, 2.5),
    ]


def test_resume_beyond_the_file_keeps_all_and_drops_the_torn_line(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as job:
        log_steps(job, 1, 4)
    whole = job.path.read_bytes()
    job.path.write_bytes(whole + b'{"step": 4')
    open_metrics(tmp_path, resume_step=7).close()
    assert job.path.read_bytes() == whole


def test_a_fresh_start_drops_the_old_lines(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as job:
        job.log_eval(0, 4.0, 0.0)
        log_steps(job, 1, 4)
    with open_metrics(tmp_path) as job:
        job.log_eval(0, 4.5, 0.0)
    assert [r["eval_loss"] for r in read_metrics(job.path)] == [4.5]


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_is_not_written_twice(tmp_path: Path, step: int) -> None:
    with open_metrics(tmp_path) as job:
        log_steps(job, 1, 4)
        with pytest.raises(RuntimeError, match=f"'gsm8k': step must be greater .*3, got {step}"):
            log_steps(job, step, step + 1)
    resumed = open_metrics(tmp_path, resume_step=5)
    with resumed, pytest.raises(RuntimeError, match=r"greater than the last .*written, 5, got 5"):
        log_steps(resumed, 5, 6)


@pytest.mark.parametrize("line", ["{not json", "[1]", '{"loss": 1.0}', '{"step": "1"}', "\0\0"])
def test_a_corrupt_whole_line_is_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 must be a JSON object with an integer"):
        read_metrics(path)


def shown_by_tensorboard(job: JobMetrics) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(job.path.parent / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_events_hide_what_a_resume_takes_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for begin, end, loss in ((1, 6, 1.0), (4, 7, 2.0)):
        with open_metrics(tmp_path, tensorboard=True, resume_step=begin - 1) as job:
            log_steps(job, begin, end, loss=loss)
            job.log_eval(end - 1, 0.5, None)
    events = shown_by_tensorboard(job)
    assert {"train/loss", "train/grad_norm", "train/lr"} < set(events.Tags()["scalars"])
    assert "eval/exact_match" not in events.Tags()["scalars"]
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert [e.step for e in events.Scalars("eval/loss")] == [6]


def test_tensorboard_goes_on_when_a_full_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gfile = pytest.importorskip("tensorboard.compat.tensorflow_stub.io.gfile")
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    often = partial(metrics._summary_writer(), flush_secs=0.01)
    monkeypatch.setattr(metrics, "_summary_writer", lambda: lambda flush_secs, **to: often(**to))
    with open_metrics(tmp_path, tensorboard=True) as job:
        log_steps(job, 1, 3)
        job._events.flush()
        with monkeypatch.context() as full, open("/dev/full", "ab", buffering=0) as nowhere:
            full.setattr(gfile.LocalFileSystem, "append", disk_full)
            full.setattr(job, "_file", nowhere)
            log_steps(job, 3, 4)
            job._events.file_writer.event_writer._async_writer._worker.join(HANG_S)
            log_steps(job, 4, 6)
        log_steps(job, 6, 8)
    losses = shown_by_tensorboard(job).Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 6, 7]
    assert [line["step"] for line in read_metrics(job.path)] == [*range(1, 8)]
    assert [r.message for r in caplog.records][1:] == ["job gsm8k: TensorBoard goes on at step 6"]


def test_without_tensorboard_one_warning_for_all_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    metrics._summary_writer.cache_clear()
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            with open_metrics(tmp_path, name=name, tensorboard=True) as job:
                log_steps(job, 1, 3)
            assert len(read_metrics(job.path)) == 2
    metrics._summary_writer.cache_clear()
    assert [r.message for r in caplog.records if "pip install tensorboard" in r.message] == [
        "no TensorBoard events are written: it is missing; pip install tensorboard"
    ]


def test_wandb_that_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"'j': W&B must be installed .*'p'; pip install 'wandb"):
        open_metrics(tmp_path, name="j", wandb_project="p")


class FakeWandbRun:
    def __init__(self, run_id: str) -> None:
        self.id, self.lines, self.finished = run_id, [], 0

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, line: dict) -> None:
        self.lines.append(line)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_run_is_continued_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FakeWandbRun] = []
    asked: list[dict] = []

    def init(**options: object) -> FakeWandbRun:
        asked.append(options)
        runs.append(FakeWandbRun(options["id"] or f"new{len(runs)}"))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for resume_step in (0, 2, 0):
        job = open_metrics(tmp_path, name="j", wandb_project="p", resume_step=resume_step)
        job.log_step(resume_step + 1, NAN, 0.5, 1e-3, 40, 100, 0.25)
        job.close()
        job.close()
    assert [run.id for run in runs] == ["new0", "new0", "new2"]
    assert all(o["project"] == "p" and o["name"] == "j" for o in asked)
    assert [run.finished for run in runs] == [1, 1, 1]
    line = runs[1].lines[0]
    assert (line["step"], line["train/grad_norm"]) == (3, 0.5)


def test_summary_is_strict_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_summary(tmp_path, {"run": {"rounds": 3}, "jobs": {"a": {"last_loss": NAN}}})
    assert path == tmp_path / "summary.json"
    first = {"run": {"rounds": 3}, "jobs": {"a": {"last_loss": None}}}
    assert json.loads(path.read_text()) == first
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="disk full"):
        write_summary(tmp_path, {"run": {}})
    assert json.loads(path.read_text()) == first
    assert os.listdir(tmp_path) == ["summary.json"]


def test_reading_metrics_needs_no_torch() -> None:
    assert not imported("import tlora_megatron.training.run.report", "torch")


def test_nothing_is_written_once_somebody_else_owns_the_file(tmp_path: Path) -> None:
    owns = [True]
    with open_metrics(tmp_path, may_write=lambda: owns[0]) as job:
        log_steps(job, 1, 3)
        owns[0] = False
        log_steps(job, 3, 5)
    assert [line["step"] for line in read_metrics(job.path)] == [1, 2]
