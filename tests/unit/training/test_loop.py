"""Rounds as a caller with a loop of its own drives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tlora_megatron.config.run import RunSpec
from tlora_megatron.training.listener import SilentListener
from tlora_megatron.training.loop import TrainingLoop


class Told(SilentListener):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, jobs: Any) -> None:
        self.calls.append("start")

    def on_round(self, tokens_per_s: float) -> None:
        self.calls.append("round")


def loop_over(job: SimpleNamespace, told: Told) -> TrainingLoop:
    super_model: Any = SimpleNamespace(
        jobs=(job,), groups=SimpleNamespace(is_writer=False, device=torch.device("cpu")),
        bins=None, train_round=lambda: [],
    )  # fmt: skip
    backbone: Any = None
    run = RunSpec(output_dir="unused")
    return TrainingLoop(super_model, backbone, run, told, base_model="base")


def running_job() -> SimpleNamespace:
    return SimpleNamespace(
        name="a", step=0, is_active=True, is_done=False, eval_before=1.0,
        data=SimpleNamespace(eval=()), plan=SimpleNamespace(num_steps=2),
    )  # fmt: skip


def test_the_first_step_starts_and_none_runs_once_all_is_over() -> None:
    job, told = running_job(), Told()
    loop = loop_over(job, told)
    assert (loop.step(), told.calls) == ([], ["start", "round"])
    loop.start()
    loop.step()
    job.is_active = False
    assert (loop.is_over, loop.step(), loop.rounds) == (True, [], 2)
    assert told.calls == ["start", "round", "round"]


def test_nothing_is_over_before_the_start() -> None:
    job = running_job()
    job.is_active = False
    loop = loop_over(job, Told())
    assert not loop.is_over
    loop.start()
    assert loop.is_over


def test_another_may_run_the_round() -> None:
    loop = loop_over(running_job(), Told())
    ran: list[str] = []

    def run_round() -> list[Any]:
        ran.append("elsewhere")
        return []

    assert loop.step(run_round) == []
    assert ran == ["elsewhere"]
    assert loop.train_time_s > 0
