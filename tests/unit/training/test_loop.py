"""Rounds as a caller with a loop of its own drives them, and when jobs are saved."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlora_megatron.config.schema import RunSpec
from tlora_megatron.training.job_files import JobFiles
from tlora_megatron.training.job_saves import SavePolicy
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.run_watch import RunWatch
from tlora_megatron.training.signals import StopSignals


class Kinds:
    def __init__(self) -> None:
        self.found: list[str] = []

    def emit(self, kind: str, job: str | None, body: Any) -> None:
        self.found.append(kind)


def loop_over(job: SimpleNamespace, kinds: Kinds, watch: RunWatch | None = None) -> Loop:
    super_model: Any = SimpleNamespace(
        jobs=(job,), groups=SimpleNamespace(is_writer=False, device=torch.device("cpu")),
        round=None, train_round=lambda: [],
    )  # fmt: skip
    backbone: Any = None
    run = RunSpec(output_dir="unused")
    files = JobFiles(run, base_model="base", quantisation=None, has_metrics=False)
    return Loop(super_model, backbone, run, files, kinds, watch=watch)


def running_job() -> SimpleNamespace:
    return SimpleNamespace(
        name="a", step=0, is_active=True, is_done=False, is_held=False, eval_before=1.0,
        lacks_reference=False, data=SimpleNamespace(eval=()), plan=SimpleNamespace(num_steps=2),
    )  # fmt: skip


def test_the_first_step_starts_and_none_runs_once_all_is_over() -> None:
    job, kinds = running_job(), Kinds()
    job.is_active = False
    loop = loop_over(job, kinds)
    assert not loop.is_over, "before the start"
    job.is_active = True
    assert (loop.step(), kinds.found) == ([], ["begun", "progress"])
    loop.start()
    loop.step()
    job.is_active = False
    assert (loop.is_over, loop.step(), loop.rounds) == (True, [], 2)
    assert kinds.found == ["begun", "progress", "progress"]


class StopBehind(RunWatch):
    """All ranks have agreed to stop behind a round."""

    def __init__(self, round_number: int) -> None:
        self.signals = StopSignals(speaks=False)
        super().__init__(self.signals)
        self._round_number = round_number
        self.calls: list[object] = []

    def begin_round(self, number: int) -> None:
        self.calls.append(number)

    def end_round(self) -> int:
        return 15 if self.calls[-1] == self._round_number else 0


def test_a_signal_ends_the_loop_behind_its_round_with_everything_saved() -> None:
    watch = StopBehind(2)
    loop = loop_over(running_job(), Kinds(), watch)
    loop.save_active = lambda: watch.calls.append("save")  # type: ignore[method-assign]
    loop.saves.drain = lambda: watch.calls.append("drain") or ("a",)  # type: ignore
    loop.run()
    assert watch.calls == [1, 2, "save", "drain"]
    assert (loop.stopped_by, watch.signals.stopped_by, loop.is_over) == (15, 15, False)
    assert loop.stop_sentence is not None
    assert "0 of 1 jobs are saved, but not a" in loop.stop_sentence
    assert loop.step() == []


def test_a_signal_in_the_last_round_changes_nothing() -> None:
    job, watch = running_job(), StopBehind(1)
    loop = loop_over(job, Kinds(), watch)

    def run_round() -> list[Any]:
        job.is_active = False
        return []

    loop.step(run_round)
    assert (loop.is_over, loop.stopped_by, watch.signals.stopped_by) == (True, 0, 0)


@pytest.mark.parametrize(
    ("every_s", "has_checkpoint", "due_s"),
    [(60.0, False, 3.0), (60.0, True, 60.0), (1.0, False, 1.0), (0.0, False, math.inf)],
)
def test_jobs_without_checkpoint_due(every_s: float, has_checkpoint: bool, due_s: float) -> None:
    saves = SavePolicy(0, every_s)
    saves.join(100.0, has_checkpoint=has_checkpoint)
    for now_s in (100.0, 102.0, 104.0, 159.0, 161.0):
        assert (saves.late_s(now_s) >= 0) == (now_s - 100.0 >= due_s)


@pytest.mark.parametrize("lives_s", [4.0, 10.0, 50.0, 600.0])
def test_a_job_whose_gang_died_keeps_most_of_what_the_next_one_does(lives_s: float) -> None:
    saves, kept_s, waits = SavePolicy(0, 60.0, soon=True), 0.0, list[float]()
    saves.join(0.0, has_checkpoint=True)
    for now_s in range(1, int(lives_s)):
        if saves.late_s(now_s) >= 0:
            waits.append(now_s - kept_s)
            kept_s = now_s
            saves.save(now_s)
    assert kept_s >= lives_s * 0.6 - 2
    assert waits == sorted(waits)
    assert waits[-1] <= 61
    assert len(waits) < 8 + lives_s / 60
