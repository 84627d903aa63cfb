"""Moves of running groups pay, wait and are few; starts and joins pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.floor_model import FREE, World
from tlora_megatron.scheduler.formation import Parts, formed
from tlora_megatron.scheduler.policy import Decision, RegroupCost
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue
from tlora_megatron.service.control.decide import MoveLimiter, bundles
from tlora_megatron.service.control.machines import Machines
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.settings import Settings

CHEAP = RegroupCost(admit_s=0.0, replan_s=1.0, weights_bytes_per_s=1e12)
DEAR = replace(CHEAP, replan_s=1000.0)


class Scene:
    """A group of two jobs on GPU 0 that slow each other, and a job that waits."""

    def __init__(self, settings: Settings | None = None) -> None:
        world = World(gpus_per_node=4)
        jobs = [world.add(0, 100, batch=10), world.add(0, 100, batch=10), world.add(0, 50)]
        waiting = [Waiting(job=job, tokens_left=job.tokens, queued_s=0.0) for job in jobs]
        parts = Parts(joining=tuple(waiting[:2]))
        rates = world.speeds.rates(parts.kinds, 1)
        assert rates is not None
        group = formed(parts, gpus=(0,), rates=rates, now_s=0.0, cost=FREE, number=1)
        self.groups: dict[int, Group] = {1: group}
        self.queue = WaitingQueue(waiting[2:])
        self.regrouping = MoveLimiter(settings or Settings(policy="tlora_best"), world.speeds)

    def admitted(
        self, decisions: list[Decision], cost: RegroupCost = CHEAP, now_s: float = 0.0
    ) -> list[Decision]:
        return self.regrouping.admitted(decisions, self.groups, self.queue, cost, now_s)


START = Decision(members=(2,), gpus=(3,))
JOIN = Decision(members=(0, 1, 2), gpus=(0,), dissolve=(1,))
SPLIT = [Decision(members=(0,), gpus=(0,), dissolve=(1,)), Decision(members=(1,), gpus=(1,))]


@pytest.mark.parametrize("decision", [START, JOIN])
def test_starts_and_joins_always_pass(decision: Decision) -> None:
    scene = Scene()
    for now_s in range(10):
        assert scene.admitted([decision], DEAR, float(now_s)) == [decision]


def test_a_move_must_bring_more_than_its_pause_costs() -> None:
    assert Scene().admitted(SPLIT, CHEAP) == SPLIT
    assert Scene().admitted(SPLIT, DEAR) == []


def test_what_belongs_together_passes_or_waits_together() -> None:
    assert bundles([*SPLIT, START], Scene().groups) == [SPLIT, [START]]
    assert Scene().admitted([*SPLIT, START], DEAR) == [START]


def test_a_group_that_was_moved_stays_for_a_while() -> None:
    scene = Scene()
    assert scene.admitted(SPLIT, now_s=0.0)
    assert scene.admitted(SPLIT, now_s=59.0) == []
    assert scene.admitted(SPLIT, now_s=60.0) == SPLIT


def test_the_cluster_makes_few_moves_a_minute() -> None:
    scene = Scene(Settings(policy="tlora_best", dwell_s=0.0))
    passed = [bool(scene.admitted(SPLIT, now_s=float(second))) for second in range(6)]
    assert passed == [True] * 4 + [False] * 2
    assert scene.admitted(SPLIT, now_s=61.0) == SPLIT


def test_machines_of_unequal_width_lack_gpus_and_have_places() -> None:
    nodes = [
        NodeInfo(node=0, address="", gpus=2),
        NodeInfo(node=2, address="", gpus=1),
        NodeInfo(node=3, address="", gpus=2, healthy=False),
    ]
    machines = Machines.of(nodes)
    assert (machines.shape.num_nodes, machines.missing, machines.down) == (4, (5,), (1, 3))
    assert machines.places((0, 1, 4)) == ((0, 0), (0, 1), (2, 0))
    assert machines.numbers(((2, 0), (0, 1))) == (1, 4)


def test_an_engine_without_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match="must have at least one GPU or worker slot, got none"):
        Machines.of([])
