"""Bounds and the estimate of what is within reach, on jobs worked out by hand."""

from __future__ import annotations

import math

import pytest

from tests.helpers.floor_model import World
from tlora_megatron.scheduler.registry import POLICIES
from tlora_megatron.sim.bounds import (
    Limits,
    alone_s,
    exceeded_by,
    fluid_s,
    least_mean_jct_s,
    limits_of,
    malleable_mean_jct_s,
    mean_busy_s,
)

FULL = 10
"""A batch that keeps one GPU of the world busy; half of it trains half as many tokens."""


def bounds(world: World, num_gpus: int) -> tuple[float, float, float]:
    limits = limits_of(world.jobs, world.speeds, num_gpus)
    demands = [limits.demand(job) for job in world.jobs]
    return alone_s(demands), fluid_s(demands, num_gpus), mean_busy_s(demands, num_gpus)


def test_one_job_has_the_gpu_to_itself() -> None:
    world = World()
    world.add(7, 100, batch=FULL)
    assert bounds(world, 1) == pytest.approx((100, 100, 100))


def test_two_jobs_share_a_gpu_one_after_the_other() -> None:
    world = World()
    world.add(0, 100, batch=FULL)
    world.add(0, 100, batch=FULL)
    assert bounds(world, 1) == pytest.approx((100, 150, 150))


def test_the_short_job_goes_first_when_it_comes() -> None:
    world = World()
    world.add(0, 100, batch=FULL)
    world.add(50, 10, batch=FULL)
    # It ends after 10 s; the long one after 110, of which it was served around the 50th second.
    assert bounds(world, 1) == pytest.approx((55, 60, (10 + 55 + 50) / 2))


def test_small_batches_need_their_own_time_however_many_share_a_gpu() -> None:
    world = World()
    world.add(0, 100, batch=FULL // 2)
    world.add(0, 100, batch=FULL // 2)
    # Each takes 50 GPU seconds, and 100 s anywhere: served around second 25 and 75.
    assert bounds(world, 1) == pytest.approx((100, 75, 100))
    assert world.ends("tlora_best") == [100, 100], "which fusing achieves"


def test_more_gpus_make_a_large_batch_faster() -> None:
    world = World(gpus_per_node=4)
    world.add(0, 100, batch=4 * FULL)
    world.add(0, 100, batch=FULL)
    assert bounds(world, 4) == pytest.approx(((25 + 100) / 2, (25 + 50) / 2, (25 + 87.5) / 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bound(policy: str) -> None:
    world = World(nodes=2, gpus_per_node=4, most_jobs=5)
    for index in range(60):
        base = ("base", "other")[index % 2]
        batch, num_gpus = (1, 4, 8, 10, 40)[index % 5], (1, 1, 2, 4, 6)[index % 5]
        world.add(9.0 * index, 10.0 + 41 * index % 97, batch=batch, num_gpus=num_gpus, base=base)
    records = world.run(policy).ledger.records
    mean_s = math.fsum(record.jct_s for record in records) / len(records)
    assert 0 < least_mean_jct_s(world.jobs, world.speeds, 8) <= mean_s
    assert exceeded_by(limits_of(world.jobs, world.speeds, 8), world.speeds) == []


def test_groups_beyond_the_limits_are_named() -> None:
    world = World()
    kind = world.add(0, 100, batch=FULL).kind
    fast = Limits(fastest={kind: 1000.0}, full={"base": 1000.0, "other": 1000.0})
    assert exceeded_by(fast, world.speeds) == []
    slow = Limits(fastest={kind: 900.0}, full={"base": 1000.0, "other": 1000.0})
    assert exceeded_by(slow, world.speeds) == [f"kinds ({kind},) on 1 GPUs: 1000 tokens/s"]


@pytest.mark.parametrize(
    ("short_at_s", "short_s", "ends"),
    [
        (0, 10, (110, 10)),
        # Paused at 50, back at 60, ready at 120.
        (50, 10, (170, 60)),
        # Ahead of what is left of the other, but nothing is saved by going first.
        (50, 50, (100, 150)),
    ],
)
def test_malleable_jobs_are_paused_for_shorter_ones(
    short_at_s: float, short_s: float, ends: tuple[float, float]
) -> None:
    world = World()
    world.add(0, 100, batch=FULL)
    world.add(short_at_s, short_s, batch=FULL)
    expected = (ends[0] + ends[1] - short_at_s) / 2
    assert malleable_mean_jct_s(world.jobs, world.speeds, 1) == pytest.approx(expected)


def test_malleable_jobs_grow_and_shrink() -> None:
    world = World(gpus_per_node=4)
    world.add(0, 4000, batch=4 * FULL)
    assert malleable_mean_jct_s(world.jobs, world.speeds, 4) == pytest.approx(1000)
    world.add(500, 600, batch=FULL)
    # On four GPUs until 500, on two from 560 with 2,000 s of one GPU left until the other has
    # ended at 1,100; on four again from 1,160 with 920 s left.
    expected = ((1160 + 920 / 4) + 600) / 2
    assert malleable_mean_jct_s(world.jobs, world.speeds, 4) == pytest.approx(expected)
