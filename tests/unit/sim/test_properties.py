"""Whatever comes: the state is consistent, bounds hold, and the same input gives the same log."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.floor_model import World
from tlora_megatron.scheduler.policy import NO_COST, Changes, Decision, Policy, RegroupCost, Rules
from tlora_megatron.scheduler.registry import POLICIES, make_policy
from tlora_megatron.sim.cluster import Faults
from tlora_megatron.sim.ledger import Ledger

JOB = st.fixed_dictionaries(
    {
        "gap_s": st.sampled_from((0.0, 0.5, 7.0, 40.0)),
        "isolated_s": st.sampled_from((1.0, 10.0, 33.3, 200.0)),
        "batch": st.sampled_from((1, 4, 8, 10, 40)),
        "num_gpus": st.sampled_from((1, 1, 1, 2, 3, 4, 6)),
        "base": st.sampled_from(("base", "base", "other")),
        "max_slowdown": st.sampled_from((1.0, 1.3, 2.0, 5.0)),
        "priority": st.sampled_from((0, 0, 1)),
        "tenant": st.sampled_from(("a", "b")),
        "patience_s": st.sampled_from((5.0, 100.0)),
        "state_bytes": st.sampled_from((0.0, 1e9)),
    }
)
FATE = st.lists(st.sampled_from(("end", "end", "end", "fail", "cancel")), min_size=30, max_size=30)
OUTAGES = st.lists(
    st.tuples(st.sampled_from((3.0, 30.0, 120.0)), st.integers(0, 1)),
    max_size=2,
    unique_by=lambda o: o[1],
)
COSTS = st.sampled_from((NO_COST, RegroupCost(), RegroupCost(weights_bytes={"base": 16e9})))


def world_of(jobs: list[dict[str, Any]]) -> World:
    world = World(nodes=2, gpus_per_node=4, most_jobs=5)
    now_s = 0.0
    for drawn in jobs:
        fields = dict(drawn)
        now_s += fields.pop("gap_s")
        due_s = now_s + fields.pop("patience_s")
        world.add(now_s, fields.pop("isolated_s"), due_s=due_s, **fields)
    return world


def faults_of(world: World, fates: list[str], outages: list[tuple[float, int]]) -> Faults:
    jobs = list(zip(world.jobs, fates, strict=False))
    return Faults(
        fails_after_tokens={j.index: 0.4 * j.tokens for j, fate in jobs if fate == "fail"},
        cancelled_s={j.index: j.submit_s + 5.0 for j, fate in jobs if fate == "cancel"},
        outages=tuple(sorted((begin, begin + 50.0, node) for begin, node in outages)),
        checkpoint_s=4.0,
    )


def log_of(ledger: Ledger) -> str:
    return repr((ledger.records, ledger.segments))


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(JOB, min_size=1, max_size=30),
    fates=FATE,
    outages=OUTAGES,
    cost=COSTS,
    policy=st.sampled_from(sorted(POLICIES)),
    quota=st.sampled_from((None, 4)),
)
def test_books_balance(
    jobs: list[dict[str, Any]],
    fates: list[str],
    outages: list[tuple[float, int]],
    cost: RegroupCost,
    policy: str,
    quota: int | None,
) -> None:
    """`run` itself checks jobs, GPU seconds, tokens, memory, quotas and bounds."""
    world = world_of(jobs)
    faults = faults_of(world, fates, outages)
    quotas = {} if quota is None else {"a": quota}
    ledger = world.run(policy, cost=cost, faults=faults, quotas=quotas)
    for record in ledger.records:
        job = record.job
        assert record.end_s >= job.submit_s
        assert (record.status == "failed") <= (job.index in faults.fails_after_tokens)
        if record.status == "finished" and policy != "mlora":
            assert record.slowdown is not None
            assert record.slowdown <= job.max_slowdown * (1 + 1e-6) + 1e-5
        if policy.startswith("isolated") and record.status == "finished":
            assert record.slowdown is not None
            assert record.slowdown <= 1 + 1e-6 + 60 / job.isolated_s * bool(record.lost_tokens)
    assert log_of(world.run(policy, cost=cost, faults=faults, quotas=quotas)) == log_of(ledger)


@settings(max_examples=40, deadline=None)
@given(jobs=st.lists(JOB, min_size=2, max_size=30), policy=st.sampled_from(sorted(POLICIES)))
def test_the_longest_due_starts_when_what_runs_has_ended(
    jobs: list[dict[str, Any]], policy: str
) -> None:
    """From its due time on a job waits for those due earlier, and for what runs: no one else."""
    world = world_of(jobs)
    slowest = 5 if policy == "mlora" else max(job.max_slowdown for job in world.jobs)
    longest_s = slowest * max(job.isolated_s for job in world.jobs)
    for record in world.run(policy).records:
        job = record.job
        earlier = sum((o.due_s, o.index) < (job.due_s, job.index) for o in world.jobs)
        assert record.start_s is not None
        assert record.start_s <= job.due_s + longest_s * (1 + earlier)


class Watched:
    """Asks a policy twice and compares what it saw before and after."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.keeps_bounds = policy.keeps_bounds

    def decide(self, now_s: float, jobs: Any, cluster: Any, changes: Changes) -> list[Decision]:
        before = copy.deepcopy((vars(jobs), cluster.groups, vars(cluster.free), changes))
        decisions = self.policy.decide(now_s, jobs, cluster, changes)
        assert self.policy.decide(now_s, jobs, cluster, changes) == decisions
        assert (vars(jobs), cluster.groups, vars(cluster.free), changes) == before
        return decisions


@settings(max_examples=25, deadline=None)
@given(jobs=st.lists(JOB, min_size=1, max_size=20), policy=st.sampled_from(sorted(POLICIES)))
def test_deciding_changes_nothing(jobs: list[dict[str, Any]], policy: str) -> None:
    world = world_of(jobs)
    world.run(Watched(make_policy(policy, world.speeds, Rules(cost=NO_COST))))
