"""The simulator on cases worked out by hand: bounds, faults, quotas, priorities, accounts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scripts.bench.simulate.cases import exceeded_by
from tests.helpers.floor_model import World, job
from tlora_megatron.scheduler.fleet import InvariantError
from tlora_megatron.scheduler.group_throughput import CalibratedSpeeds
from tlora_megatron.scheduler.policy import NO_COST, Changes, Decision, Policy, RegroupCost, Rules
from tlora_megatron.scheduler.registry import POLICIES, make_policy
from tlora_megatron.sim.bounds import (
    Limits,
    alone_s,
    fluid_s,
    least_mean_jct_s,
    limits_of,
    mean_busy_s,
)
from tlora_megatron.sim.cluster import FaultRates, Faults, Truth, draw_faults
from tlora_megatron.sim.ledger import Ledger, summarise, time_line


def by_job(ledger: Ledger) -> list[Any]:
    return sorted(ledger.records, key=lambda record: record.job.index)


def test_a_node_fails_and_the_job_goes_on_from_its_checkpoint() -> None:
    world = World(job(0, 100))
    faults = Faults(outages=((50.0, 60.0, 0),), checkpoint_s=20.0)
    (record,) = by_job(world.run("isolated", faults=faults))
    assert record.end_s == 60 + 60  # ten seconds since the last checkpoint are lost
    assert record.lost_tokens == pytest.approx(10 * 500)
    assert record.start_s == 0
    cost = RegroupCost(replan_s=7.0)
    assert by_job(world.run("isolated", faults=faults, cost=cost))[0].end_s == 120 + 7


def test_other_nodes_do_not_notice() -> None:
    world = World(job(0, 100), job(0, 100), nodes=2)
    faults = Faults(outages=((50.0, 200.0, 1),), checkpoint_s=60.0)
    # The second loses its 50 s and waits for the first one's node.
    assert world.ends("isolated", faults=faults) == [100, 200]


def test_a_job_fails_where_it_was_drawn_to() -> None:
    world = World(job(0, 100), job(0, 100))
    faults = Faults(fails_after_tokens={0: 25000.0})
    first, second = by_job(world.run("isolated", faults=faults))
    assert (first.status, first.end_s, first.slowdown) == ("failed", 50, None)
    assert (second.status, second.end_s) == ("finished", 150)


def test_cancelled_while_running_waiting_and_too_late() -> None:
    world = World()
    for _ in range(3):
        world.add(0, 100)
    faults = Faults(cancelled_s={0: 30.0, 1: 20.0, 2: 1000.0})
    records = by_job(world.run("isolated", faults=faults))
    assert [(r.status, r.end_s) for r in records] == [
        ("cancelled", 30),
        ("cancelled", 20),
        ("finished", 130),
    ]
    assert records[1].start_s is None


@pytest.mark.parametrize("policy", ["mlora", "tlora", "tlora_best"])
def test_a_cancelled_member_leaves_its_group(policy: str) -> None:
    world = World(job(0, 100, batch=8), job(0, 100, batch=8))
    faults = Faults(cancelled_s={1: 40.0})
    first, _ = by_job(world.run(policy, faults=faults, rules={"keep_bounds": False}))
    together = first.end_s > 100
    # 500 tokens/s for 40 s, then 800: 75 s more; or alone from the start.
    assert first.end_s == pytest.approx(115 if together else 100)


def test_quota_holds_a_tenant_back_but_no_other() -> None:
    world = World(gpus_per_node=3)
    for tenant in ("a", "a", "b"):
        world.add(0, 100, batch=10, tenant=tenant)
    world.add(0, 100, batch=10, num_gpus=2, tenant="a")
    ledger = world.run("isolated", quotas={"a": 1})
    records = by_job(ledger)
    assert [record.end_s for record in records] == [100, 200, 100, 0]
    assert records[3].status == "rejected"  # asks for more than its tenant may ever have


@pytest.mark.parametrize("policy", POLICIES)
def test_higher_priority_goes_first(policy: str) -> None:
    world = World()
    world.add(0, 100, batch=10, max_slowdown=1.0)
    world.add(1, 100, batch=10, max_slowdown=1.0)
    world.add(2, 100, batch=10, max_slowdown=1.0, priority=1)
    rules = {"max_group_size": 1}
    ousts = policy == "tlora_elastic"
    assert world.ends(policy, rules=rules) == ([200, 300, 102] if ousts else [100, 300, 200])


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves(policy: str) -> None:
    """One-GPU jobs come faster than they end; a job for both GPUs starts soon after it is due."""
    world = World(gpus_per_node=2)
    world.add(0, 10, batch=10)
    world.add(1, 10, batch=20, num_gpus=2, due_s=61.0, max_slowdown=1.1)
    for step in range(200):
        world.add(4.0 * step + 2, 10, batch=10)
    record = by_job(world.run(policy))[1]
    assert record.start_s is not None
    # What ran when it was due, at its bound of 2; without bounds, as many as memory allows.
    assert record.start_s <= 61 + 10 * (8 if policy == "mlora" else 2)


@pytest.mark.parametrize("policy", ["isolated", "isolated_sjf"])
def test_without_a_due_time_it_waits_for_a_gap(policy: str) -> None:
    world = World(job(0, 10, batch=10), job(1, 10, batch=20, num_gpus=2), gpus_per_node=2)
    for step in range(200):
        world.add(4.0 * step + 2, 10, batch=10)
    assert by_job(world.run(policy))[1].start_s > 800


@pytest.mark.parametrize("policy", ["isolated", "tlora", "tlora_best"])
def test_low_priority_is_due_at_last(policy: str) -> None:
    world = World(job(0, 10, batch=10), job(1, 10, batch=10, due_s=35.0))
    for step in range(20):
        world.add(2 + 5.0 * step, 10, batch=10, priority=1)
    assert by_job(world.run(policy))[1].start_s == 40


def test_the_largest_job_the_cluster_can_never_run_is_rejected() -> None:
    world = World(job(0, 10), job(5, 10, num_gpus=2))
    assert [r.status for r in by_job(world.run("isolated"))] == ["finished", "rejected"]


def test_events_of_one_moment_are_taken_in_before_deciding() -> None:
    """The end at 10 frees the GPU for the shorter of two jobs that come at 10."""
    world = World(job(0, 10), job(10, 50), job(10, 20))
    assert world.ends("isolated_sjf") == [10, 80, 30]


class Scripted:
    """Decides what it is told."""

    keeps_bounds = True

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = list(decisions)

    def decide(self, *_: object) -> list[Decision]:
        found, self.decisions = self.decisions, []
        return found


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision(members=(0, 1), gpus=(0,)), "slowdown bounds must hold for jobs"),
        (Decision(members=(0, 2), gpus=(0,)), "members must share a base model"),
        (
            Decision(members=(0, 1, 3), gpus=(0,)),
            "memory of 1 GPUs must hold jobs job0, job1, job3",
        ),
    ],
)
def test_a_policy_that_breaks_a_rule_is_found_out(decision: Decision, message: str) -> None:
    world = World(gpus_per_node=2, most_jobs=2)
    for base in ("base", "base", "other", "base"):
        world.add(0, 10, batch=10, base=base, max_slowdown=1.5)
    with pytest.raises(InvariantError, match=message):
        world.run(Scripted(decision))


def test_a_policy_that_never_starts_a_job_is_found_out() -> None:
    with pytest.raises(InvariantError, match="each of 1 jobs must end once, got 0 ends"):
        World(job(0, 10)).run(Scripted())


def test_summary_by_hand() -> None:
    world = World(gpus_per_node=2)
    world.add(0, 100, batch=10)
    world.add(50, 100, batch=10)
    world.add(100, 50, batch=10)
    ledger = world.run("isolated")
    summary = summarise(
        ledger.records, ledger.segments, {"base": 2.0}, num_gpus=2, flops_per_s=4000.0
    )
    assert (summary.mean_jct_s, summary.p50_jct_s, summary.p99_jct_s) == (250 / 3, 100, 100)
    assert (summary.makespan_s, summary.window_s) == (150, 100)
    assert summary.throughput_tokens_per_s == (100 + 50) * 1000 / 100
    assert summary.gpu_utilisation == 150000 * 2 / (2 * 100 * 4000)
    assert summary.gpu_allocation == 150 / 200
    assert summary.gpu_hours * 3600 == 250
    assert summary.bounds_missed == 0
    assert (summary.max_slowdown, summary.jobs_finished) == (1, 3)
    line = time_line(ledger.records, ledger.segments, until_s=150, bins=3)
    assert line.busy_gpus == (1, 2, 2)
    assert line.tokens_per_s == (1000, 2000, 2000)


@pytest.mark.parametrize("policy", ["isolated", "tlora_best", "tlora_elastic"])
def test_where_speeds_are_wrong_all_jobs_end_and_books_balance(policy: str) -> None:
    world = World(gpus_per_node=2)
    for index in range(60):
        batch, num_gpus = (2, 5, 20)[index % 3], 1 + (index % 3 == 2)
        world.add(40 * index, 200 + 7 * index % 90, batch=batch, num_gpus=num_gpus)
    right = world.run(policy).records
    known = world.speeds
    world.speeds = CalibratedSpeeds.beside(known)
    records = world.run(policy, truth=Truth(error=0.2, seed=1)).records
    slowdowns = [record.slowdown or 0.0 for record in records]
    assert len(records) == 60
    assert max(slowdowns) < 2.0 * 1.2
    assert sum(slowdown > 2.0 * 1.05 for slowdown in slowdowns) <= 2  # before any is measured
    assert policy != "isolated" or slowdowns == pytest.approx([1.0] * 60, rel=0.02)  # by drift
    world.speeds = CalibratedSpeeds.beside(known)
    none = world.run(policy, truth=Truth(error=0.0, seed=1)).records
    assert [r.end_s for r in none] == pytest.approx([r.end_s for r in right])


def test_faults_are_the_seeds() -> None:
    world = World()
    for _ in range(200):
        world.add(0, 100)
    rates = FaultRates(job_failures=0.2, cancellations=0.1, node_mtbf_hours=10.0)
    drawn = draw_faults(rates, world.jobs, 4, seed=3)
    assert drawn == draw_faults(rates, world.jobs, 4, seed=3)
    assert drawn != draw_faults(rates, world.jobs, 4, seed=4)
    assert 20 < len(drawn.fails_after_tokens) < 60
    assert 5 < len(drawn.cancelled_s) < 40
    assert drawn.outages
    assert not drawn.fails_after_tokens.keys() & drawn.cancelled_s.keys()


class Recorder:
    """A policy that notes when it is asked and what it is told has changed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.keeps_bounds = policy.keeps_bounds
        self.told: list[tuple[float, Changes]] = []

    def decide(self, now_s: float, jobs: Any, cluster: Any, changes: Changes) -> list[Decision]:
        self.told.append((now_s, changes))
        return self.policy.decide(now_s, jobs, cluster, changes)


def test_a_policy_is_told_each_change_once() -> None:
    world = World(job(0, 100), job(10, 50))
    recorder = Recorder(make_policy("mlora", world.speeds, Rules(cost=NO_COST)))
    world.run(recorder)
    (first, start), (second, join), (third, leave) = recorder.told
    assert (first, second, third) == (0, 10, 60)
    assert start == Changes(arrived={0})
    assert join == Changes(arrived={1}, freed=False)
    assert (leave.arrived, len(leave.regrouped), leave.freed) == (frozenset(), 1, True)


FULL = 10
"""A batch that keeps one GPU of the world busy; half of it trains half as many tokens."""


def bounds(world: World, num_gpus: int) -> tuple[float, float, float]:
    limits = limits_of(world.jobs, world.speeds, num_gpus)
    demands = [limits.demand(job) for job in world.jobs]
    return alone_s(demands), fluid_s(demands, num_gpus), mean_busy_s(demands, num_gpus)


def test_two_jobs_share_a_gpu_one_after_the_other() -> None:
    world = World(job(0, 100, batch=FULL), job(0, 100, batch=FULL))
    assert bounds(world, 1) == pytest.approx((100, 150, 150))


def test_the_short_job_goes_first_when_it_comes() -> None:
    world = World(job(0, 100, batch=FULL), job(50, 10, batch=FULL))
    # It ends after 10 s; the long one after 110, of which it was served around the 50th second.
    assert bounds(world, 1) == pytest.approx((55, 60, (10 + 55 + 50) / 2))


def test_small_batches_need_their_own_time_however_many_share_a_gpu() -> None:
    world = World(job(0, 100, batch=FULL // 2), job(0, 100, batch=FULL // 2))
    # Each takes 50 GPU seconds, and 100 s anywhere: served around second 25 and 75.
    assert bounds(world, 1) == pytest.approx((100, 75, 100))
    assert world.ends("tlora_best") == [100, 100], "which fusing achieves"


def test_more_gpus_make_a_large_batch_faster() -> None:
    world = World(job(0, 100, batch=4 * FULL), job(0, 100, batch=FULL), gpus_per_node=4)
    assert bounds(world, 4) == pytest.approx(((25 + 100) / 2, (25 + 50) / 2, (25 + 87.5) / 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bound(policy: str) -> None:
    world = World(nodes=2, gpus_per_node=4, most_jobs=5)
    for index in range(60):
        base = ("base", "other")[index % 2]
        batch, num_gpus = (1, 4, 8, 10, 40)[index % 5], (1, 1, 2, 4, 6)[index % 5]
        world.add(9.0 * index, 10.0 + 41 * index % 97, batch=batch, num_gpus=num_gpus, base=base)
    records = world.run(policy).records
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
