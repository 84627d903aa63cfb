"""Decisions are quick with long queues: function calls are counted, not seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.floor_model import FREE, World
from tests.helpers.operations import count_calls
from tlora_megatron.scheduler.fleet import Parts, formed
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policy import (
    Changes,
    ClusterShape,
    ClusterState,
    FreeGpus,
    Policy,
    Rules,
)
from tlora_megatron.scheduler.queue import Job, Waiting, WaitingQueue
from tlora_megatron.scheduler.registry import POLICIES, make_policy
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceRow
from tlora_megatron.sim.workload import load_mix

_RUNNING, _WAITING = 100, 1000
_MOMENTS_S = (50.0, 1050.0)
"""When is decided: before any job is due, and when some are."""


def _num_gpus(index: int) -> int:
    return 1 if index < _RUNNING else (1, 1, 1, 2, 8)[index % 5]


_MOST_CALLS = 400_000
"""Twice what the busiest policy takes; comparing every two waiting jobs would take millions."""
EVERYTHING_CHANGED = Changes(
    arrived=frozenset(range(_RUNNING, _RUNNING + _WAITING)),
    regrouped=frozenset(range(_RUNNING)),
    freed=True,
)


def _crowd(jobs: Sequence[Job], speeds: Speeds) -> tuple[WaitingQueue, ClusterState]:
    """128 GPUs, of which 100 jobs hold one each; the other jobs wait."""
    shape = ClusterShape(num_nodes=16, gpus_per_node=8, nodes_per_rack=4)
    state = ClusterState(shape=shape, free=FreeGpus.all_of(shape))
    waiting = [Waiting(job=j, tokens_left=j.tokens, queued_s=j.submit_s) for j in jobs]
    assert len(waiting) == _RUNNING + _WAITING
    for number, entry in enumerate(waiting[:_RUNNING]):
        rates = speeds.rates((entry.job.kind,), 1)
        assert rates is not None
        parts = Parts(joining=(entry,))
        group = formed(parts, gpus=(number,), rates=rates, now_s=0.0, cost=FREE, number=number)
        state.groups[number] = group
        state.free.take(group.gpus)
    return WaitingQueue(waiting[_RUNNING:]), state


def _calls(policy: Policy, now_s: float, queue: WaitingQueue, state: ClusterState) -> int:
    """Functions that a decision calls; before, an equal one fills what is kept between them."""
    assert policy.decide(now_s, queue, state, EVERYTHING_CHANGED)
    return count_calls(lambda: policy.decide(now_s, queue, state, EVERYTHING_CHANGED))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_with_1000_waiting_jobs_calls_few_functions(policy: str) -> None:
    world = World()
    for index in range(_RUNNING + _WAITING):
        world.add(
            0.1 * index,
            100.0 + index % 37,
            batch=(1, 2, 4, 8)[index % 4],
            num_gpus=_num_gpus(index),
            base=("base", "other")[index % 2],
            due_s=1000.0 + index,
        )
    queue, state = _crowd(world.jobs, world.speeds)
    made = make_policy(policy, world.speeds, Rules(cost=FREE))
    for now_s in _MOMENTS_S:
        assert _calls(made, now_s, queue, state) < _MOST_CALLS


@pytest.fixture(scope="module")
def study(repo: Path) -> Study:
    """Jobs of the mix `paper` with the planner's speeds on 128 A100s."""
    rows = [
        TraceRow(name=str(i), submit_s=0.1 * i, duration_s=100.0 + i % 37, num_gpus=_num_gpus(i))
        for i in range(_RUNNING + _WAITING)
    ]
    cluster, profile = load_cluster(repo / "configs" / "hardware" / "cluster-128xA100.yaml")
    mix, specs = load_mix("paper")
    return Study(
        trace=Trace(name="crowd", rows=tuple(rows), dropped={}),
        cluster=cluster,
        profile=profile,
        mix=mix,
        specs=specs,
        options=Options(),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_does_with_the_planners_speeds_once_they_are_known(study: Study, policy: str) -> None:
    """The model's first time with a mix is not in it: milliseconds each."""
    queue, state = _crowd(study.jobs, study.speeds)
    made = make_policy(policy, study.speeds, Rules())
    for now_s in (_MOMENTS_S[0], max(job.due_s for job in study.jobs[:500])):
        made.decide(now_s, queue, state, EVERYTHING_CHANGED)
        known = study.speeds.num_estimates
        assert _calls(made, now_s, queue, state) < _MOST_CALLS
        assert study.speeds.num_estimates == known
