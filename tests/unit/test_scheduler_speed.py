"""Decisions are quick with long queues. CPU time counts, so that a busy machine changes nothing."""

from __future__ import annotations

import time

import pytest

from tests.helpers.floor_model import FREE, World
from tlora_megatron.scheduler.cluster import ClusterShape, ClusterState, FreeGpus
from tlora_megatron.scheduler.formation import Parts, formed
from tlora_megatron.scheduler.jobs import Waiting
from tlora_megatron.scheduler.policy import Rules
from tlora_megatron.scheduler.queue import WaitingQueue
from tlora_megatron.scheduler.registry import POLICIES, make_policy


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_with_1000_waiting_jobs_takes_less_than_50_ms(policy: str) -> None:
    """128 GPUs, 100 of them held by jobs alone, all of which changed; nobody was decided on yet."""
    world = World()
    for index in range(1100):
        world.add(
            0.1 * index,
            100.0 + index % 37,
            batch=(1, 2, 4, 8)[index % 4],
            num_gpus=1 if index < 100 else (1, 1, 1, 2, 8)[index % 5],
            base=("base", "other")[index % 2],
            due_s=1000.0 + index,
        )
    shape = ClusterShape(num_nodes=16, gpus_per_node=8, nodes_per_rack=4)
    state = ClusterState(shape=shape, free=FreeGpus.all_of(shape))
    waiting = [Waiting(job=j, tokens_left=j.tokens, queued_s=j.submit_s) for j in world.jobs]
    for number, entry in enumerate(waiting[:100]):
        rates = world.speeds.rates((entry.job.kind,), 1)
        assert rates is not None
        parts = Parts(joining=(entry,))
        group = formed(parts, gpus=(number,), rates=rates, now_s=0.0, cost=FREE, number=number)
        state.groups[number] = group
        state.free.take(group.gpus)
        state.changed.add(number)
    queue = WaitingQueue(waiting[100:])
    made = make_policy(policy, world.speeds, Rules(cost=FREE))
    times = []
    for now_s in (50.0, 1050.0):  # 1,050: some are past their due time
        for _ in range(3):
            begin = time.process_time()
            decisions = made.decide(now_s, queue, state)
            times.append(time.process_time() - begin)
        assert decisions
    assert min(times[:3]) < 0.05
    assert min(times[3:]) < 0.05
