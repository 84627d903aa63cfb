"""Rounds by time: their rule and depth, and speeds that are corrected by what rounds took."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.training import round_timing
from tlora_megatron.training.packing.packing import Round
from tlora_megatron.training.round_timing import (
    DEPTHS,
    ENOUGH,
    WORTH,
    BusyShare,
    RateCorrection,
    RoundTiming,
    choose_depth,
    outlook,
)

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


def test_by_tokens_at_depth_1_and_for_jobs_with_portions() -> None:
    assert timing(1).rule([job(5)], speaks=False) is None
    assert timing("auto").rule([job(5), job(5, portion_tokens=8)], speaks=False) is None


def test_a_given_depth_is_taken() -> None:
    rule = timing(4, stages=2).rule([job(5)], speaks=False)
    assert rule is not None
    assert (rule.depth, rule.stages, rule.rates) == (4, (2, 2), (RATE, RATE))


@pytest.mark.parametrize(("replicas", "stages", "depth"), [(1, 1, None), (2, 2, 1)])
def test_auto_knows_where_depth_is_of_no_use(replicas: int, stages: int, depth: int | None) -> None:
    rule = timing("auto", replicas, stages).rule([job(5)], speaks=False)
    assert (None if rule is None else rule.depth) == depth


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


FAST = ReplicaRate(token_ps=32_000, square_ps=64, fixed_ps=320, longest=100)
SLOW = ReplicaRate(token_ps=64_000, square_ps=128, longest=50)
CPU = torch.device("cpu")


class World:
    """Processes of one replica each, whose rounds take what they are told to."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *rates: ReplicaRate, frozen: bool = False
    ) -> None:
        self._patch = monkeypatch
        self.rates = rates
        self.ranks = [
            RateCorrection(rates, own=own, device=CPU, frozen=frozen) for own in range(len(rates))
        ]

    def run(self, *times_s: float, rounds: int = 8) -> None:
        """Rounds in which each replica takes so long, and is predicted a second."""
        clock = [0.0]
        self._patch.setattr(round_timing.time, "perf_counter", lambda: clock[0])
        one_second: Any = lambda *_: [10**12] * len(times_s)  # noqa: E731
        self._patch.setattr(round_timing, "round_ends_ps", one_second)
        for rank, time_s in zip(self.ranks, times_s, strict=True):
            for _ in range(rounds):
                with rank.measured(Round(replicas=())):
                    clock[0] += time_s

    def settle(self) -> None:
        sums: list[torch.Tensor] = []
        self._patch.setattr(round_timing.dist, "all_reduce", sums.append)
        for rank in self.ranks:
            rank.settle()  # what each brings
        total = sum(t.clone() for t in sums)
        self._patch.setattr(round_timing.dist, "all_reduce", lambda t: t.copy_(total))
        for rank in self.ranks:
            rank.settle()


def test_a_kind_that_is_slower_than_predicted_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, FAST, SLOW, SLOW)
    world.run(2.0, 2.5, 2.5)
    world.settle()
    for rank in world.ranks:
        assert rank.rates[0] == FAST
        assert rank.rates[1] == rank.rates[2]
        assert (rank.rates[1].token_ps, rank.rates[1].square_ps) == (80_000, 160)
        assert rank.over_predicted == pytest.approx(7 / 3)


@pytest.mark.parametrize(
    ("rates", "times_s", "rounds", "frozen"),
    [
        ((FAST, FAST), (1.7, 3.1), 8, False),
        ((FAST, SLOW), (1.0, 2.0), 8, True),
        ((FAST, SLOW), (1.0, 9.0), 3, False),
    ],
    ids=["alike", "frozen", "before every kind has run"],
)
def test_speeds_that_stay_are_measured(
    rates: tuple[ReplicaRate, ...],
    times_s: tuple[float, ...],
    rounds: int,
    frozen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, *rates, frozen=frozen)
    world.run(*times_s, rounds=rounds)
    world.settle()
    for rank in world.ranks:
        assert rank.rates == rates
        assert rank.state() is None or len(set(rates)) > 1
        if rounds == 8:  # the first ones load kernels
            assert rank.over_predicted == pytest.approx(sum(times_s) / 2)


def test_a_run_that_goes_on_has_the_saved_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, FAST, SLOW)
    world.run(1.0, 1.25)
    world.settle()
    state = world.ranks[0].state()
    assert state is not None
    resumed = RateCorrection((SLOW, FAST), own=0, device=CPU, frozen=False)
    resumed.restore(state)
    assert resumed.rates == world.ranks[0].rates[::-1]
    other = RateCorrection((FAST, FAST), own=0, device=CPU, frozen=False)
    other.restore(state)
    assert other.rates == (FAST, FAST)


RATE_OF_8B = ReplicaRate(token_ps=53_000_000, square_ps=2700, fixed_ps=0, longest=16384)
"""An 8B model on an H200, about."""


def heavy_tail(mean: float, seed: int, batch_size: int = 64) -> Callable[[int], list[int]]:
    def batch(number: int) -> list[int]:
        draw = random.Random(1000 * seed + number)
        drawn = (draw.lognormvariate(math.log(mean) - 0.5, 1.0) for _ in range(batch_size))
        return [min(16384, max(16, int(rows))) for rows in drawn]

    return batch


MIX = [heavy_tail(mean, seed) for seed, mean in enumerate((250, 400, 700, 3900))]


def test_depth_grows_until_replicas_are_busy() -> None:
    outlooks = choose_depth(MIX, [RATE_OF_8B] * 8)
    assert [o.depth for o in outlooks] == list(DEPTHS[: len(outlooks)])
    assert outlooks[-1].depth > 1
    for before, after in itertools.pairwise(outlooks):
        assert before.busy_share < ENOUGH
        gain = after.busy_share / before.busy_share
        assert gain >= WORTH or before.smallest_speed / after.smallest_speed <= WORTH


def test_short_sequences_need_no_depth_and_of_what_fits_none_is_looked_at() -> None:
    (only,) = choose_depth([lambda _: [100] * 999], [RATE_OF_8B] * 4)
    assert only.depth == 1
    assert only.busy_share > ENOUGH
    (only,) = choose_depth([lambda _: [16000, 20, 20, 20]], [RATE_OF_8B] * 2)
    assert only.depth == 1
    assert only.busy_share < 0.6


def test_the_smallest_job_is_not_slowed_for_little() -> None:
    # A round of one micro-batch a replica is 94 % busy: 15 sequences of a kind on two replicas.
    rate = ReplicaRate(token_ps=100, square_ps=0, longest=800)
    jobs = [lambda _: [100] * 200, lambda _: [110]]
    (only,) = choose_depth(jobs, [rate] * 2)
    deeper = outlook(jobs, [rate] * 2, 2)
    assert only.busy_share < deeper.busy_share < WORTH * only.busy_share
    assert only.smallest_speed > 1.5 * deeper.smallest_speed
