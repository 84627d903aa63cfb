"""The policy `tlora_elastic`: pauses, shrinking, growing, and the bounds that they keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.floor_model import NO_COST, World, job
from tlora_megatron.scheduler.fleet import Fleet, Parts
from tlora_megatron.scheduler.policies.elastic import ElasticGroups, make_room
from tlora_megatron.scheduler.policy import ClusterState, Decision, FreeGpus, RegroupCost, Rules
from tlora_megatron.scheduler.queue import Pause, Waiting, WaitingQueue


def _long_and_short(max_slowdown: float = 2.0) -> World:
    """One GPU: a job of 1,000 s, and at 10 s one of 5 s that cannot be fused with it."""
    world = World()
    world.add(0, 1000, batch=10, max_slowdown=max_slowdown)
    world.add(10, 5, batch=10, base="other")
    return world


def test_a_long_job_pauses_for_a_short_one() -> None:
    world = _long_and_short()
    assert world.ends("tlora_best") == [1000, 1005]
    assert world.ends("tlora_elastic") == [1005, 15]


def test_a_small_job_is_fused_before_anyone_pauses() -> None:
    world = World(job(0, 1000), job(10, 5))  # 500 tokens each; a GPU takes 1,000 in a second
    assert world.ends("tlora_elastic") == [1000, 15]


def test_a_small_job_leaves_gpus_free_where_it_slows_nobody() -> None:
    world = World(job(0, 1000), job(10, 500, batch=4), job(20, 500, batch=6), gpus_per_node=4)
    cost = RegroupCost(admit_s=1.0)
    ledger = world.run("tlora_elastic", cost=cost)
    assert sorted(len(s.gpus) for s in ledger.segments if s.num_jobs == 2) == [1]
    assert {r.job.index: r.end_s for r in ledger.records} == {0: 1001, 1: 511, 2: 520}


@pytest.mark.parametrize(("asked", "most"), [(1, 1), (4, 2)])
def test_none_joins_a_job_on_more_gpus_than_it_asked_for(asked: int, most: int) -> None:
    world = World(job(0, 400, batch=30, num_gpus=asked), job(10, 5), gpus_per_node=4)
    ledger = world.run("tlora_elastic")
    assert max(len(segment.gpus) for segment in ledger.segments) == 4
    assert max(segment.num_jobs for segment in ledger.segments) == most


def test_a_group_that_may_not_move_gives_no_gpus() -> None:
    held = {"held": frozenset({1})}
    assert _long_and_short().ends("tlora_elastic", rules=held) == [1000, 1005]
    world = World(job(0, 1000), job(10, 5))
    assert world.ends("tlora_elastic", rules=held) == [1000, 15]  # who joins moves nobody


def test_urgent_jobs_pause_all_of_a_fused_group_whatever_bounds_they_have() -> None:
    world = World(job(0, 1000, max_slowdown=1.1), job(0, 500, max_slowdown=1.1))
    world.add(10, 600, batch=10, priority=1)
    assert world.ends("tlora_elastic") == [1600, 1100, 610]


def test_no_claim_of_a_less_urgent_job_keeps_an_urgent_one_waiting() -> None:
    world = _long_and_short(max_slowdown=1.1)
    world.add(12, 500, batch=10, priority=1, base="other")
    assert world.ends("tlora_elastic")[2] == 512
    world = World(job(0, 1000, batch=10, priority=1), job(10, 5, batch=10, base="other"))
    assert world.ends("tlora_elastic") == [1000, 1005]  # and none waits for a less urgent one


@pytest.mark.parametrize(("nodes", "due_s"), [(1, float("inf")), (2, float("inf")), (1, 5.0)])
def test_jobs_make_room_together(nodes: int, due_s: float) -> None:
    """Two jobs of one GPU each, and one that needs both, for the twentieth part of their time."""
    both = job(0, 1000, batch=10), job(0, 1000, batch=10)
    world = World(*both, nodes=nodes, gpus_per_node=2 // nodes)
    world.add(10, 50, batch=20, num_gpus=2, base="other", max_slowdown=1.2, due_s=due_s)
    assert world.ends("tlora_elastic") == [1050, 1050, 60]


def test_no_bound_is_broken_by_a_pause() -> None:
    assert _long_and_short(max_slowdown=1.0).ends("tlora_elastic") == [1000, 1005]


def test_a_pause_must_bring_more_than_it_costs() -> None:
    cost = RegroupCost(replan_s=200.0)
    assert _long_and_short().ends("tlora_elastic", cost=cost)[1] == 15  # waiting is 990 s
    cost = RegroupCost(replan_s=400.0)
    assert _long_and_short().ends("tlora_elastic", cost=cost) == [1000, 1005]


def test_who_pauses_saves_its_state_before_others_begin() -> None:
    world = World(job(0, 1000, batch=10, state_bytes=2e9), job(10, 5, batch=10, base="other"))
    cost = RegroupCost(replan_s=1.0, state_bytes_per_s=1e9)
    # It is saved for 2 s; then it loads for as long and is planned anew.
    assert world.ends("tlora_elastic", cost=cost) == [1000 + 2 + 5 + 3, 10 + 2 + 5]


@pytest.mark.parametrize(("short_s", "ends"), [(35, [100, 235, 145]), (45, [100, 200, 245])])
def test_a_bound_counts_from_submission(short_s: float, ends: list[float]) -> None:
    """The second job starts early enough to end within 150 s of its submission at 90 s."""
    world = World()
    world.add(0, 100, batch=10, max_slowdown=1.0)
    world.add(90, 100, batch=10, max_slowdown=1.5, base="other")
    world.add(110, short_s, batch=10)
    assert world.ends("tlora_elastic") == ends


def test_who_waited_too_long_has_the_bound_from_its_start_on() -> None:
    world = World()
    world.add(0, 100, batch=10, max_slowdown=1.0)
    world.add(0, 100, batch=10, max_slowdown=1.2, base="other")
    world.add(110, 15, batch=10)
    assert world.ends("tlora_elastic") == [100, 215, 125]


def test_the_job_of_a_pause_may_pause_too_but_comes_back_in_time() -> None:
    world = World()
    world.add(0, 1000, batch=10, max_slowdown=1.2)
    world.add(10, 100, batch=10, base="other", max_slowdown=3.0)
    world.add(20, 10, batch=10, max_slowdown=3.0)
    world.add(140, 95, batch=10, base="other")  # the first job has 90 s left to give
    assert world.ends("tlora_elastic") == [1110, 120, 30, 1205]


def test_a_job_grows_into_idle_gpus() -> None:
    """4,000 tokens a step take four seconds on one GPU and one on four."""
    world = World(job(0, 400, batch=40), gpus_per_node=4)
    assert world.ends("isolated") == [400]
    assert world.ends("tlora_elastic") == [100]


def test_a_wide_job_shrinks_while_a_short_one_needs_gpus() -> None:
    world = World(job(0, 400, batch=40), job(10, 5, batch=10, base="other"), gpus_per_node=4)
    # Half as fast for 5 s, then on four GPUs again.
    assert world.ends("tlora_elastic") == [102.5, 15]
    sizes = [len(s.gpus) for s in world.run("tlora_elastic").segments if s.base == "base"]
    assert sizes == [4, 2, 4]


def test_a_paused_job_is_charged_to_its_tenant() -> None:
    world = World(gpus_per_node=2)
    world.add(0, 1000, batch=20, num_gpus=2, tenant="a")
    world.add(10, 5, batch=20, num_gpus=2, base="other", tenant="b")
    world.add(11, 3, batch=10, num_gpus=1, base="other", tenant="a")
    ends = world.ends("tlora_elastic", quotas={"a": 2})
    assert ends[0] < 1010
    assert ends[2] > ends[0], "the quota holds both GPUs for the paused job"


def test_sjf_rightsize_does_not_fuse() -> None:
    world = World(job(0, 100), job(10, 50))
    assert world.ends("sjf_rightsize") == [100, 150]
    assert world.ends("tlora_best") == [100, 60]


def test_a_job_that_shrinks_saves_its_state_before_a_paused_one_needs_its_gpus() -> None:
    """The room for a job counts the save, or its place would be gone when it is to start."""
    world = World(gpus_per_node=2)
    jobs = [
        world.add(0, 1000, batch=20, num_gpus=2),
        world.add(0, 200, batch=20, num_gpus=2, state_bytes=2e8, max_slowdown=3.0),
        world.add(0, 5, batch=10, base="other"),
    ]
    cost = replace(NO_COST, state_bytes_per_s=1e9)
    rules = Rules(cost=cost)
    shape = ClusterState(shape=world.shape, free=FreeGpus.all_of(world.shape), quotas={})
    running, short = (Waiting(job=job, tokens_left=job.tokens, queued_s=0.0) for job in jobs[1:])
    first = ElasticGroups(0.0, shape, world.speeds, rules)
    proposal = first.propose(Parts(joining=(running,)), (0, 1))
    assert proposal is not None
    group = replace(proposal.group, number=1)
    shape.free.take([0, 1])
    shape.groups[1] = group
    for back_by_s, makes_room in ((5.1, False), (5.3, True)):
        pause = Pause(gpus=(1,), back_by_s=back_by_s, started_s=0.0, deadline_s=2000.0)
        waits = Waiting(job=jobs[0], tokens_left=jobs[0].tokens, queued_s=0.0, pause=pause)
        tentative = ElasticGroups(0.0, shape, world.speeds, rules, [waits])
        left = make_room(tentative, [short])
        assert (not left) == makes_room


def test_who_was_paused_comes_back_before_an_overdue_job_reserves_its_gpus() -> None:
    """The second job may not have the GPU: it is kept for the first, whose bound it would break."""
    world = World()
    world.add(0, 1000, batch=10, due_s=14)
    world.add(5, 2000, batch=10, due_s=13, base="other")
    world.add(10, 5, batch=10, due_s=20)
    assert world.ends("tlora_elastic") == [1005, 3005, 15]


def test_a_pause_counts_only_the_claims_of_jobs_that_still_wait() -> None:
    """The right of a job that starts in the same decision binds no job that pauses in it."""
    world = World(nodes=2)
    jobs = [world.add(0, 100, batch=10), world.add(0, 100, batch=10), world.add(5, 5, batch=10)]
    fleet = Fleet(shape=world.shape, speeds=world.speeds)
    pause = Pause(gpus=(0,), back_by_s=20.0, started_s=0.0, deadline_s=120.0)
    queue = WaitingQueue([Waiting(job=jobs[0], tokens_left=jobs[0].tokens, queued_s=0.0)])
    running = Decision(members=(0,), gpus=(0,))
    (group,) = fleet.carry_out([running], queue, now_s=0.0, cost=NO_COST)
    queue.add(Waiting(job=jobs[1], tokens_left=jobs[1].tokens, queued_s=0.0, pause=pause))
    fleet.charge(jobs[1])
    queue.add(Waiting(job=jobs[2], tokens_left=jobs[2].tokens, queued_s=5.0))
    decisions = [
        Decision(members=(1,), gpus=(1,)),
        Decision(members=(2,), gpus=(0,), dissolve=(group.number,), pause=(0,)),
    ]
    fleet.carry_out(decisions, queue, now_s=5.0, cost=NO_COST)
    found = queue[0].pause
    assert found is not None
    assert found.back_by_s == 200 - 95  # its own bound


def test_a_short_job_joins_clients_rather_than_pausing_another() -> None:
    world = World(gpus_per_node=2)
    world.add(0, 10_000, batch=10, is_open=True)
    world.add(5, 1000, batch=10, base="other")
    world.add(10, 20, batch=10)
    assert world.ends("tlora_elastic")[1:] == [1005, 30]


def test_a_wide_job_does_not_join_clients_where_it_would_end_later_than_by_waiting() -> None:
    world = World(gpus_per_node=3)
    world.add(0, 10_000, batch=10, is_open=True)
    world.add(0, 30, batch=20, num_gpus=2, base="other", max_slowdown=1.0)
    world.add(10, 100, batch=20, num_gpus=2, max_slowdown=4.0)
    assert world.ends("tlora_elastic")[1:] == [30, 130]


def test_an_urgent_job_does_not_wait_for_the_gpus_kept_for_an_overdue_one() -> None:
    world = World(job(0, 1000, batch=10, max_slowdown=1.0), nodes=1, gpus_per_node=2)
    world.add(5, 50, batch=20, num_gpus=2, base="other", due_s=6, max_slowdown=1.0)
    world.add(10, 2000, batch=10, priority=1)
    assert world.ends("tlora_elastic")[2] == 2010
