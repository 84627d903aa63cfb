"""Which rule a run's rounds follow, and how busy they say that replicas were."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.training.packing.packing import Round
from tlora_megatron.training.round_timing import BusyShare, RoundTiming, describe_rounds

RATE = ReplicaRate(token_ps=100, square_ps=1, fixed_ps=0, longest=100)


def timing(depth: Any, replicas: int = 2, stages: int = 1) -> RoundTiming:
    return RoundTiming(
        rates=(RATE,) * replicas, stages=(stages,) * replicas, depth=depth, source="a test"
    )


def job(*lengths: int, portion_tokens: int | None = None) -> Any:
    batch = [SimpleNamespace(tokens=range(rows + 1)) for rows in lengths]
    spec = SimpleNamespace(portion_tokens=portion_tokens)
    return SimpleNamespace(batch=lambda _: batch, plan=SimpleNamespace(num_steps=1), spec=spec)


def content(*replicas: tuple[int, ...]) -> Round:
    made: Any = tuple(
        (tuple(SimpleNamespace(item=SimpleNamespace(length=rows)) for rows in own),)
        for own in replicas
    )
    return Round(replicas=made)


def test_depth_1_balances_tokens_as_ever() -> None:
    assert timing(1).rule([job(5)], speaks=False) is None


def test_a_given_depth_is_taken() -> None:
    rule = timing(4, stages=2).rule([job(5)], speaks=False)
    assert rule is not None
    assert (rule.depth, rule.stages, rule.rates) == (4, (2, 2), (RATE, RATE))


@pytest.mark.parametrize(("replicas", "stages", "depth"), [(1, 1, None), (2, 2, 1)])
def test_auto_knows_where_depth_is_of_no_use(replicas: int, stages: int, depth: int | None) -> None:
    rule = timing("auto", replicas, stages).rule([job(5)], speaks=False)
    assert (None if rule is None else rule.depth) == depth


def test_auto_leaves_jobs_with_portions_as_they_are() -> None:
    assert timing("auto").rule([job(5), job(5, portion_tokens=8)], speaks=False) is None


def test_auto_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [100, 60, 50, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    with caplog.at_level(logging.INFO):
        rule = timing("auto").rule([job(*lengths)], speaks=True)
    assert rule is not None
    assert f"rounds of {rule.depth} micro-batches a replica, in which the 2" in caplog.text
    assert "by prediction (a test)" in caplog.text


def test_the_busy_share_is_of_all_rounds() -> None:
    busy = BusyShare()
    assert busy.share is None
    made = timing(1)
    busy.add(made.ends_ps(content((10,), (10,))))
    busy.add(made.ends_ps(content((10,), ())))
    assert busy.share == 0.75
    assert describe_rounds(None, None, busy, None) is None
    found = describe_rounds(made, None, busy, 1.1)
    assert found == {
        "round_depth": 1,
        "shared_out_by": "tokens",
        "depth": 1,
        "predicted_busy_share": 0.75,
        "speeds_from": "a test",
        "measured_over_predicted": 1.1,
    }
