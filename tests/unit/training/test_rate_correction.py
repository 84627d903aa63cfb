"""Speeds are corrected by what rounds took, in coarse steps, and kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.training import round_timing
from tlora_megatron.training.packing.packing import Round
from tlora_megatron.training.round_timing import RateCorrection

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
        """All processes agree."""
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


def test_alike_replicas_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, FAST, FAST)
    world.run(1.7, 3.1)
    world.settle()
    assert world.ranks[0].rates == (FAST, FAST)
    assert world.ranks[0].state() is None
    assert world.ranks[0].over_predicted == pytest.approx(2.4)


def test_nothing_is_corrected_before_every_kind_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, FAST, SLOW)
    world.run(1.0, 9.0, rounds=3)  # the first ones load kernels
    world.settle()
    assert world.ranks[0].rates == (FAST, SLOW)


def test_frozen_speeds_are_measured_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, FAST, SLOW, frozen=True)
    world.run(1.0, 2.0)
    world.settle()
    assert world.ranks[1].rates == (FAST, SLOW)
    assert world.ranks[1].over_predicted == pytest.approx(1.5)


def test_a_run_that_goes_on_has_the_corrections_that_were_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
