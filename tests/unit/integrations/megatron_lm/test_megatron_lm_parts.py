"""Stand-ins in the trainer's places: its iterators, its optimizer and the losses of its log."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tlora_megatron.integrations.megatron_lm import experts
from tlora_megatron.integrations.megatron_lm.engine import (
    IntervalLosses,
    JobOptimizer,
    MicroBatchFeed,
    NoSchedule,
)


class _Named(NamedTuple):
    name: str


class _Outcome(NamedTuple):
    loss: float


class _Report(NamedTuple):
    """The fields of a `StepReport` that are read."""

    job: _Named
    outcome: _Outcome
    target_tokens: int


def report(name: str, loss: float, targets: int = 1) -> Any:
    return _Report(_Named(name), _Outcome(loss), targets)


class Trainer:
    """How `training_log` of Megatron-LM adds up and shows losses."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.losses = IntervalLosses()
        self.totals: dict[str, Any] = {}

    def log(self, iteration: int, reports: list[Any]) -> dict[str, float]:
        """The line of an iteration; nothing between intervals but behind the first."""
        added = self.losses.add(reports)
        loss_dict = {key: torch.tensor(loss) for key, loss in added.items()}
        if iteration % self.interval == 0:
            self.losses.correct(loss_dict, self.totals)
        totals = self.totals
        totals["advanced iterations"] = totals.get("advanced iterations", 0) + 1
        for key, loss in loss_dict.items():
            totals[key] = totals.get(key, torch.tensor([0.0])) + loss
        first = iteration == 1
        if not first and iteration % self.interval:
            return {}
        keys = [key for key in totals if key != "advanced iterations"]
        line = {key: totals[key].item() / totals["advanced iterations"] for key in keys}
        if not first:
            totals.update(dict.fromkeys(keys, torch.tensor([0.0])), **{"advanced iterations": 0})
        return {key: value for key, value in line.items() if value > 0.0}


def test_a_job_s_loss_is_the_mean_over_its_own_steps() -> None:
    trainer = Trainer(interval=4)
    steps = [[("a", 4.0), ("b", 8.0)], [("a", 2.0)], [("a", 3.0)], [("a", 3.0), ("b", 6.0)]]
    lines = [
        trainer.log(i, [report(*step) for step in done]) for i, done in enumerate(steps, start=1)
    ]
    assert lines[0] == {"lm loss": 6.0, "loss/a": 4.0, "loss/b": 8.0}
    assert lines[1:3] == [{}, {}]
    assert lines[3] == pytest.approx({"lm loss": (6 + 2 + 3 + 4.5) / 4, "loss/a": 3, "loss/b": 7})
    # Who did not step in an interval is not in its line, also not with an old value.
    lines = [trainer.log(i, [report("a", 1.0)]) for i in range(5, 9)]
    assert lines[-1] == pytest.approx({"lm loss": 1.0, "loss/a": 1.0})


def test_every_line_stands_for_itself_with_an_interval_of_one() -> None:
    trainer = Trainer(interval=1)
    lines = [trainer.log(i, [report("a", float(i))]) for i in range(1, 5)]
    assert [line["loss/a"] for line in lines] == pytest.approx([1, 2, 3, 4])


def test_the_loss_of_all_jobs_is_weighted_by_tokens_and_finite() -> None:
    reports = [report("a", 1.0, 30), report("b", 5.0, 10), report("c", math.nan, 10)]
    losses = IntervalLosses().add(reports)
    assert losses["lm loss"] == 2.0
    assert math.isnan(losses["loss/c"])
    assert list(losses) == ["lm loss", "loss/a", "loss/b", "loss/c"]
    assert IntervalLosses().add([]) == {}


def test_all_readers_give_the_round_in_order() -> None:
    feed = MicroBatchFeed()
    readers = [feed.reader(), feed.reader()]
    batches: Any = [object(), object(), object()]
    feed.fill(batches)
    assert [next(readers[0]) for _ in range(3)] == batches
    assert next(iter(readers[1])) is batches[0]
    feed.fill(batches[:1])
    assert next(readers[1]) is batches[0]
    with pytest.raises(RuntimeError, match="as many micro-batches as the trainer asks for"):
        next(readers[1])


def test_the_trainer_s_optimizer_ends_the_round() -> None:
    from megatron.core.optimizer import OptimizerConfig

    rounds: list[int] = []

    def end_round() -> tuple[float, float]:
        rounds.append(1)
        return 2.5, 1e-3

    optimizer = JobOptimizer(OptimizerConfig(), end_round, torch.device("cpu"))
    optimizer.zero_grad()
    assert optimizer.step() == (True, 2.5, None)
    assert len(rounds) == 1
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[0]["default_config"]
    loss: Tensor = optimizer.scale_loss(torch.tensor(3.0))
    assert loss.item() == 3.0
    assert optimizer.state_dict() == optimizer.sharded_state_dict({}) == {}
    schedule = NoSchedule()
    schedule.step(increment=8)
    assert schedule.num_steps == 8
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_torch_s_norm_stands_where_megatron_found_apex(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for module, name in experts._NORMS:
        monkeypatch.setattr(module, name, FusedLayerNorm)
    with caplog.at_level(logging.INFO):
        experts._leave_apex_norm()
        experts._leave_apex_norm()
    assert {getattr(module, name) for module, name in experts._NORMS} == {WrappedTorchNorm}
    (record,) = caplog.records
    assert "is torch's" in record.getMessage()
