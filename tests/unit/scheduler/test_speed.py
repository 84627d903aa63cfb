"""Decisions are quick with long queues: function calls are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.helpers.floor_model import NO_COST
from tlora_megatron.scheduler.fleet import Parts, formed
from tlora_megatron.scheduler.policy import Changes, ClusterShape, ClusterState, FreeGpus, Rules
from tlora_megatron.scheduler.queue import Waiting, WaitingQueue
from tlora_megatron.scheduler.registry import POLICIES, make_policy
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceRow
from tlora_megatron.sim.workload import load_mix

_RUNNING, _WAITING = 100, 1000
_MOST_CALLS = 400_000
"""Twice what the busiest policy takes; comparing every two waiting jobs would take millions."""
EVERYTHING_CHANGED = Changes(
    arrived=set(range(_RUNNING, _RUNNING + _WAITING)),
    regrouped=set(range(_RUNNING)),
    freed=True,
)


@pytest.fixture(scope="module")
def study(repo: Path) -> Study:
    """Jobs of the mix `paper` with the planner's speeds on 128 A100s."""
    sizes = [1] * _RUNNING + [1, 1, 1, 2, 8] * (_WAITING // 5)
    rows = [
        TraceRow(name=str(i), submit_s=0.1 * i, duration_s=100.0 + i % 37, num_gpus=size)
        for i, size in enumerate(sizes)
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


def _crowd(study: Study) -> tuple[WaitingQueue, ClusterState]:
    """128 GPUs, of which 100 jobs hold one each; the other jobs wait."""
    shape = ClusterShape(num_nodes=16, gpus_per_node=8, nodes_per_rack=4)
    state = ClusterState(shape=shape, free=FreeGpus.all_of(shape))
    waiting = [Waiting(job=j, tokens_left=j.tokens, queued_s=j.submit_s) for j in study.jobs]
    assert len(waiting) == _RUNNING + _WAITING
    for number, entry in enumerate(waiting[:_RUNNING]):
        rates = study.speeds.rates((entry.job.kind,), 1)
        assert rates is not None
        parts = Parts(joining=(entry,))
        group = formed(parts, gpus=(number,), rates=rates, now_s=0.0, cost=NO_COST, number=number)
        state.groups[number] = group
        state.free.take(group.gpus)
    return WaitingQueue(waiting[_RUNNING:]), state


def _calls(function: Callable[[], object]) -> int:
    """Number of Python and built-in functions that a call of `function` comes to."""
    count = 0

    def tell(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tell)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_with_1000_waiting_jobs_calls_few_functions(study: Study, policy: str) -> None:
    """The model's first time with a mix is not in it: milliseconds each."""
    queue, state = _crowd(study)
    made = make_policy(policy, study.speeds, Rules())
    # Before any job is due, and when some are.
    for now_s in (50.0, max(job.due_s for job in study.jobs[:500])):
        assert made.decide(now_s, queue, state, EVERYTHING_CHANGED)
        known = study.speeds.answers()
        decide = lambda now_s=now_s: made.decide(now_s, queue, state, EVERYTHING_CHANGED)  # noqa: E731
        assert _calls(decide) < _MOST_CALLS
        assert study.speeds.answers() == known
