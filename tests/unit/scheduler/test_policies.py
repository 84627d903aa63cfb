"""Each policy on cases of two to four jobs that can be worked out by hand.

The model (tests.helpers.floor_model): a job of batch b trains 100 b tokens a second alone; jobs
together step every max(1, tokens / 1000 a GPU) seconds.
"""

from __future__ import annotations

import pytest

from tests.helpers.floor_model import World, job
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policy import RegroupCost, Rules
from tlora_megatron.scheduler.registry import make_policy

FUSING = ("mlora", "tlora", "tlora_best")


def test_isolated_takes_jobs_in_order_of_submission() -> None:
    world = World(job(0, 100), job(10, 80), job(20, 30))
    assert world.ends("isolated") == [100, 180, 210]


def test_isolated_sjf_takes_the_shortest_waiting_job() -> None:
    world = World(job(0, 100), job(10, 80), job(20, 30))
    assert world.ends("isolated_sjf") == [100, 210, 130]


@pytest.mark.parametrize("policy", FUSING)
def test_a_job_joins_where_it_slows_nobody(policy: str) -> None:
    world = World(job(0, 100, batch=5))
    world.add(10, 50, batch=5)  # 1,000 tokens a step: still a second
    assert world.ends(policy) == [100, 60]


def test_mlora_joins_as_memory_allows_whatever_it_slows() -> None:
    world = World(job(0, 100, batch=10, max_slowdown=1.2), job(10, 50, batch=10, max_slowdown=1.2))
    # Together 500 tokens/s each: the second trains 50,000 in 100 s; the first has 40,000 left then.
    assert world.ends("mlora") == pytest.approx([150, 110])


def test_mlora_stops_where_memory_ends() -> None:
    world = World(most_jobs=2)
    for submit_s in (0, 1, 2):
        world.add(submit_s, 100, batch=1)
    assert world.ends("mlora") == [100, 101, 200]


@pytest.mark.parametrize("policy", ["tlora", "tlora_best"])
def test_a_bound_keeps_jobs_apart(policy: str) -> None:
    world = World(job(0, 100, batch=10, max_slowdown=1.5), job(10, 50, batch=10, max_slowdown=1.5))
    assert world.ends(policy) == [100, 150]


@pytest.mark.parametrize("policy", ["tlora", "tlora_best"])
def test_without_bounds_they_are_ignored(policy: str) -> None:
    world = World(job(0, 100, batch=8, max_slowdown=1.0), job(10, 10, batch=8, max_slowdown=1.0))
    first = world.run(policy, rules={"keep_bounds": False})
    assert max(segment.num_jobs for segment in first.segments) == 2
    assert max(s.num_jobs for s in world.run(policy).segments) == 1


@pytest.mark.parametrize("policy", FUSING)
def test_other_base_models_do_not_mix(policy: str) -> None:
    world = World(job(0, 100), job(10, 50, base="other"))
    assert world.ends(policy) == [100, 150]


@pytest.mark.parametrize("policy", FUSING)
def test_joining_costs_the_group_a_pause(policy: str) -> None:
    world = World(job(0, 100), job(10, 50))
    assert world.ends(policy, cost=RegroupCost(admit_s=1.0)) == [101, 61]


def test_tlora_without_residual_waits_for_gpus() -> None:
    world = World(job(0, 100), job(10, 50))
    assert world.ends("tlora", rules={"use_residual": False}) == [100, 150]


def test_tlora_merges_for_throughput_where_waiting_is_better() -> None:
    """1,000 tokens/s together are more than 800, but one second later a GPU is free."""
    world = World(job(0, 20, batch=8), job(19, 100, batch=8))
    # Merged: the first has 800 tokens at 500 a second left; the second then 79,200 at 800.
    assert world.ends("tlora") == pytest.approx([20.6, 119.6])
    assert world.ends("tlora_best") == pytest.approx([20, 120])


def test_tlora_best_finds_a_host_beyond_the_cut() -> None:
    """More residual capacity does not mean a host takes a job: here bounds forbid it."""
    world = World(gpus_per_node=3)
    world.add(0, 1000, batch=9, max_slowdown=3.0)
    world.add(0, 1000, batch=8, max_slowdown=1.0)
    world.add(0, 1000, batch=8, max_slowdown=1.0)
    world.add(10, 100, batch=5, max_slowdown=1.5)
    assert world.ends("tlora") == pytest.approx([1000, 1000, 1000, 1100])
    # In the first group steps take 1.4 s: 140 s for the joining job, 40 s more for the first job.
    assert world.ends("tlora_best") == pytest.approx([1040, 1000, 1000, 150])


def test_tlora_best_starts_a_job_on_the_gpus_it_needs() -> None:
    world = World(gpus_per_node=4)
    for _ in range(4):
        world.add(0, 100, batch=5, num_gpus=4)
    assert world.ends("isolated") == [100, 200, 300, 400]
    assert world.ends("tlora_best") == [100, 100, 100, 100]
    segments = world.run("tlora_best").segments
    assert sorted(segment.gpus for segment in segments) == [(0,), (1,), (2,), (3,)]


def parting() -> World:
    """At 10 s the third job shares the first one's GPU; at 50 s the second one's becomes free."""
    world = World(job(0, 100, batch=8), job(0, 50, batch=8), job(10, 400, batch=8), gpus_per_node=2)
    return world


@pytest.mark.parametrize("policy", ["tlora", "mlora"])
def test_fused_jobs_part_when_nothing_waits(policy: str) -> None:
    # 500 tokens/s each for 40 s leave 52,000 and 300,000 tokens, at 800 a second apart.
    apart = [50 + 65, 50, 50 + 375]
    together = [50 + 104, 50, 154 + 248000 / 800]
    ends = parting().ends(policy)
    assert ends == pytest.approx(apart if policy == "tlora" else together)


def test_a_move_is_paid_for() -> None:
    """The one that moves stands still for 4 s and for 12 GB at 2 GB/s, the other one does not."""
    cost = RegroupCost(admit_s=0.0, replan_s=4.0, weights_bytes={"base": 12e9})
    assert parting().ends("tlora", cost=cost) == pytest.approx([125, 50, 425])


def test_a_move_that_costs_more_than_it_brings_is_left() -> None:
    cost = RegroupCost(admit_s=0.0, replan_s=1000.0)
    assert parting().ends("tlora", cost=cost) == parting().ends("mlora", cost=cost)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy must be one of isolated, .*, got 'fifo'"):
        make_policy("fifo", Speeds({}), Rules())


def test_an_unknown_base_is_refused() -> None:
    world = World()
    with pytest.raises(ValueError, match="base model must be one of base, other, got 'third'"):
        world.add(0, 1, base="third")


@pytest.mark.parametrize("policy", ["isolated", "isolated_sjf", "tlora"])
def test_short_jobs_use_the_gap_before_a_job_that_is_due(policy: str) -> None:
    world = World(gpus_per_node=2)
    world.add(0, 100, batch=10, max_slowdown=1.0)
    world.add(1, 50, batch=20, num_gpus=2, due_s=1.0, max_slowdown=1.0)
    world.add(2, 40, batch=10, max_slowdown=1.0)
    world.add(3, 200, batch=10, max_slowdown=1.0)  # would be in the way until 203
    assert world.ends(policy) == [100, 150, 42, 350]


@pytest.mark.parametrize("policy", FUSING)
def test_a_driven_job_keeps_nobody_waiting_and_slows_nobody(policy: str) -> None:
    world = World()
    world.add(0, 10_000, batch=20, is_open=True)
    world.add(10, 100, batch=10, max_slowdown=1.1)
    world.add(20, 100, batch=10, max_slowdown=1.1, base="other")
    assert world.ends(policy)[1] == 110


@pytest.mark.parametrize("policy", FUSING)
def test_a_driven_job_starts_beside_others_at_once(policy: str) -> None:
    world = World()
    world.add(0, 500, batch=10, max_slowdown=1.1)
    world.add(10, 1_000, batch=20, is_open=True)
    world.add(20, 1_000, batch=20, is_open=True)
    assert world.ends(policy) == [500, 1_010, 1_020]


def test_a_driven_job_needs_the_memory_of_any_other() -> None:
    world = World(job(0, 100, batch=10), job(10, 50, is_open=True), most_jobs=1)
    assert world.ends("tlora_best") == [100, 150]


def test_tlora_groups_give_back_gpus_of_a_member_that_has_ended_to_an_overdue_job() -> None:
    world = World(gpus_per_node=4)
    world.add(0, 100, batch=5, num_gpus=4)
    world.add(10, 1000, batch=5)
    world.add(20, 50, batch=30, num_gpus=3, base="other", due_s=90.0)
    # The second joined the first, and would keep its four GPUs until 1,010.
    assert world.ends("tlora") == [100, 1010, 150]
