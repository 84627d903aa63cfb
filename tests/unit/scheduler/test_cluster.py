"""Free GPUs, reservations, the queue, and speeds that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.floor_model import FloorModel, World, job
from tlora_megatron.config.job import EXPERT_TARGETS
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.group_throughput import CalibratedSpeeds
from tlora_megatron.scheduler.policy import ClusterShape, FreeGpus, RegroupCost, soonest_nodes
from tlora_megatron.scheduler.queue import (
    Group,
    Job,
    Member,
    Waiting,
    WaitingQueue,
    coarse_lengths,
    coarse_load,
)

SHAPE = ClusterShape(num_nodes=4, gpus_per_node=4, nodes_per_rack=2)


def waiting(index: int, **fields: float) -> Waiting:
    values = {"submit_s": float(index), "isolated_s": 10.0, **fields}
    job = Job(
        index=index,
        name=str(index),
        base="base",
        kind=0,
        num_gpus=1,
        isolated_tokens_per_s=1.0,
        **values,  # type: ignore[arg-type]
    )
    return Waiting(job=job, tokens_left=job.tokens, queued_s=job.submit_s)


def group(gpus: tuple[int, ...], end_s: float, number: int = 1) -> Group:
    job = waiting(number, isolated_s=end_s).job
    member = Member(job=job, tokens_per_s=1.0, tokens_left=end_s, started_s=0.0, deadline_s=1e9)
    return Group(number=number, members=(member,), gpus=gpus, formed_s=0.0, ready_s=0.0)


def test_small_groups_fill_the_fullest_node() -> None:
    free = FreeGpus.all_of(SHAPE)
    free.take((4, 5, 6))
    assert free.find(1) == (7,)
    assert free.find(2) == (0, 1)
    assert free.num == 13


def test_large_groups_get_whole_nodes_of_one_rack_and_a_rest() -> None:
    free = FreeGpus.all_of(SHAPE)
    free.take((0,))
    assert free.find(8) == tuple(range(8, 16))
    assert free.find(6) == (1, 2, 4, 5, 6, 7)
    assert free.find(16) is None


def test_a_node_too_fragmented_is_none() -> None:
    free = FreeGpus.all_of(SHAPE)
    free.take((0, 4, 8, 12))
    assert free.num == 12
    assert free.find(4) is None
    assert free.find(3) == (1, 2, 3)


def test_taking_and_giving_twice_is_an_error() -> None:
    free = FreeGpus.all_of(SHAPE)
    free.take((3,))
    with pytest.raises(ValueError, match="not in list"):
        free.take((3,))
    free.give((3,))
    with pytest.raises(AssertionError, match="GPU 3 must not be freed twice"):
        free.give((3,))


def test_reserved_nodes_are_those_that_drain_first() -> None:
    free = FreeGpus.all_of(SHAPE)
    groups = [group((0, 1, 2, 3), 50), group((4,), 90, 2), group((8, 12), 20, 3)]
    for entry in groups:
        free.take(entry.gpus)
    assert soonest_nodes(3, SHAPE, free, groups, set()) == ((1,), 0.0)
    assert soonest_nodes(4, SHAPE, free, groups, set()) == ((2,), 20)
    assert soonest_nodes(4, SHAPE, free, groups, {2, 3}) == ((0,), 50)
    assert soonest_nodes(12, SHAPE, free, groups, set()) == ((0, 2, 3), 50)
    assert soonest_nodes(12, SHAPE, free, groups, {0, 1}) == ((), 0.0)


def test_queue_orders() -> None:
    entries = [
        waiting(0, isolated_s=30, due_s=500),
        waiting(1, isolated_s=10, due_s=100),
        waiting(2, isolated_s=20, due_s=100, priority=1),
    ]
    queue = WaitingQueue(entries)
    index = lambda found: [entry.job.index for entry in found]  # noqa: E731
    assert index(queue.by_arrival(9)) == [2, 0, 1]
    assert index(queue.by_size(9)) == [2, 1, 0]
    assert index(queue.by_size(1)) == [2]
    assert index(queue.overdue(99, 9)) == []
    assert index(queue.overdue(100, 9)) == [1, 2]
    assert index(queue.by_arrival(9, lambda entry: entry.job.index != 0)) == [2, 1]
    queue.remove(1)
    assert index(queue.by_arrival(9)) == [2, 0]
    with pytest.raises(AssertionError, match="job 2 must not wait twice"):
        queue.add(entries[2])


def test_pauses() -> None:
    cost = RegroupCost(
        admit_s=1.0,
        replan_s=10.0,
        state_bytes_per_s=100.0,
        weights_bytes_per_s=1000.0,
        weights_bytes={"base": 5000.0},
    )
    host = group((0, 1), 50)
    moved = waiting(7, state_bytes=300).job
    assert cost.pause_s((), (0,), []) == 0  # a first start
    assert cost.pause_s((host,), (0, 1), []) == 1
    assert cost.pause_s((host,), (0, 1), [moved]) == 1 + 3
    assert cost.pause_s((host,), (0,), [moved]) == 10 + 3  # GPUs that hold the base
    assert cost.pause_s((host,), (0, 2), [moved]) == 10 + 3 + 5
    assert cost.pause_s((), (0,), [moved]) == 10 + 3 + 5  # from a checkpoint


def test_equal_questions_are_asked_once() -> None:
    world = World(job(0, 1), job(0, 1))
    assert world.jobs[0].kind == world.jobs[1].kind
    assert len(world.speeds.answers()) == 1
    assert world.speeds.full_speed(0, 2) == 2000
    assert world.speeds.residual((0,), 1) == 0.5


def _speeds() -> tuple[CalibratedSpeeds, int, int]:
    speeds = CalibratedSpeeds({"base": FloorModel()})
    kinds = [
        speeds.kind(
            "base", JobLoad(name="job", rank=16, batch_size=b, lengths=LengthHistogram.single(100))
        )
        for b in (5, 20)
    ]
    return speeds, kinds[0], kinds[1]


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


def test_the_knee_follows_measured_rounds() -> None:
    speeds, one, two = _speeds()
    assert speeds.knee(one, 1) == 1024  # the model's is at 1,000
    assert speeds.knee(one, 4) == 4 * 1024
    for _ in range(5):
        speeds.measured((one,), 1, 1000.0, 10)  # of 500 tokens, in half of a second
        speeds.measured((two,), 1, 1000.0, 10)  # of 2,000, as predicted
    assert speeds.knee(one, 1) == 861  # up to where those of 500 tokens are nearest


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
