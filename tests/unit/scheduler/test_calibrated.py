"""Measured speeds correct predicted ones; loads are made coarse without losing what matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.floor_model import FloorModel
from tlora_megatron.config.job import EXPERT_TARGETS
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.group_throughput import CalibratedSpeeds
from tlora_megatron.scheduler.queue import coarse_lengths, coarse_load


def _speeds() -> tuple[CalibratedSpeeds, int, int]:
    speeds = CalibratedSpeeds({"base": FloorModel()})
    kinds = [
        speeds.kind("base", JobLoad(name="job", rank=16, batch_size=b, lengths=_hundred()))
        for b in (5, 20)
    ]
    return speeds, kinds[0], kinds[1]


def _hundred() -> LengthHistogram:
    return LengthHistogram.single(100)


def _total(speeds: CalibratedSpeeds, kinds: tuple[int, ...], num_gpus: int = 1) -> float:
    rates = speeds.rates(kinds, num_gpus)
    assert rates is not None
    return rates.total


def test_too_few_rounds_change_nothing() -> None:
    speeds, one, two = _speeds()
    assert [speeds.measured((one,), 1, 250.0, rounds=3) for _ in range(6)] == [None] * 6
    assert [speeds.measured((two,), 2, 250.0, rounds=30) for _ in range(4)] == [None] * 4
    assert (_total(speeds, (one,)), speeds.version) == (500.0, 0)


def test_a_mix_is_corrected_by_its_own_median_and_others_by_the_bases() -> None:
    speeds, one, two = _speeds()
    for measured in (400.0, 300.0, 350.0, 500.0, 250.0):
        speeds.measured((one,), 1, measured, rounds=10)
    assert _total(speeds, (one,)) == pytest.approx(350.0)
    assert _total(speeds, (two,)) == pytest.approx(700.0)
    assert _total(speeds, (one,), num_gpus=2) == pytest.approx(350.0), "the same machine"
    for measured in (250.0, 200.0, 300.0, 250.0, 250.0):
        speeds.measured((one,), 4, measured, rounds=10)
    assert _total(speeds, (one,), num_gpus=2) == pytest.approx(350.0)
    assert _total(speeds, (one,), num_gpus=8) == pytest.approx(250.0)


def test_only_a_drift_makes_a_new_version() -> None:
    speeds, one, _ = _speeds()
    for _ in range(5):
        assert speeds.measured((one,), 1, 510.0, rounds=30) is None
    assert speeds.version == 0
    drifts = [speeds.measured((one,), 1, 300.0, rounds=30) for _ in range(7)]
    assert [drift for drift in drifts if drift is not None] == [
        pytest.approx(0.81),
        pytest.approx(0.6),
    ]
    assert speeds.version == 2
    assert _total(speeds, (one,)) == pytest.approx(300.0)


def test_factors_are_clipped() -> None:
    speeds, one, _ = _speeds()
    for _ in range(5):
        speeds.measured((one,), 1, 5.0, rounds=30)
    assert _total(speeds, (one,)) == pytest.approx(250.0)


def test_residual_capacity_follows_measured_speeds() -> None:
    speeds, one, _ = _speeds()
    before = speeds.residual((one,), 1)
    for _ in range(5):
        speeds.measured((one,), 1, 900.0, rounds=30)
    assert speeds.residual((one,), 1) == pytest.approx(before)
    assert speeds.full_speed(one, 1) >= 900.0


def test_similar_files_are_of_one_kind() -> None:
    kinds = {
        coarse_load(
            JobLoad(
                name=f"job{i}",
                rank=10 + i % 4,
                batch_size=8,
                lengths=LengthHistogram.from_lengths([100 + i % 3, 200 + i % 5, 400 + i % 7] * 9),
            )
        )
        for i in range(50)
    }
    assert len(kinds) == 1


def test_ranks_on_experts_are_rounded_up_little() -> None:
    lengths = LengthHistogram.single(64)
    load = JobLoad(name="x", rank=6, batch_size=8, lengths=lengths, targets=EXPERT_TARGETS)
    assert coarse_load(load).expert_rank == 8
    assert coarse_load(replace(load, expert_rank=3)).expert_rank == 4
    assert coarse_load(replace(load, targets=("q_proj",))).expert_rank is None


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=60), st.integers(1, 300))
def test_coarse_loads_hold_what_memory_needs_and_are_themselves_coarse(
    lengths: list[int], rank: int
) -> None:
    histogram = LengthHistogram.from_lengths(lengths)
    coarse = coarse_lengths(histogram)
    assert coarse.longest >= histogram.longest
    assert len(coarse.pairs) <= 8
    load = coarse_load(JobLoad(name="x", rank=rank, batch_size=7, lengths=histogram))
    assert rank <= load.rank < rank + 16
    assert coarse_load(load).rank == load.rank
    low, high = histogram.mean * 2**-0.3, histogram.mean * 2**0.3 + histogram.longest / 8 + 1
    assert low - 1 <= load.lengths.mean <= high
