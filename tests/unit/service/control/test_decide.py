"""What is decided and done next, and what is shown of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.floor_model import World
from tests.helpers.live_service import LiveService, one_job
from tlora_megatron.cli.service.job_table import job_table
from tlora_megatron.scheduler.fleet import Parts, formed
from tlora_megatron.scheduler.policy import NO_COST, Decision, RegroupCost
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue
from tlora_megatron.service.control.actions import GangNow, Target, plan_actions
from tlora_megatron.service.control.decide import MoveLimiter, bundles
from tlora_megatron.service.control.pricing import Machines
from tlora_megatron.service.control.show import action_of
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.settings import Settings

CHEAP = RegroupCost(admit_s=0.0, replan_s=1.0, weights_bytes_per_s=1e12)

DEAR = replace(CHEAP, replan_s=1000.0)


class Scene:
    """A group of two jobs on GPU 0 that slow each other, and a job that waits."""

    def __init__(self, settings: Settings | None = None) -> None:
        world = World(gpus_per_node=4)
        jobs = [world.add(0, 100, batch=10), world.add(0, 100, batch=10), world.add(0, 50)]
        self._speeds = world.speeds
        self.waiting = [Waiting(job=job, tokens_left=job.tokens, queued_s=0.0) for job in jobs]
        self.groups = {1: self.group([0, 1], (0,))}
        self.queue = WaitingQueue(self.waiting[2:])
        self.regrouping = MoveLimiter(settings or Settings(policy="tlora_best"), world.speeds)

    def group(self, members: list[int], gpus: tuple[int, ...]) -> Group:
        parts = Parts(joining=tuple(self.waiting[index] for index in members))
        rates = self._speeds.rates(parts.kinds, len(gpus))
        assert rates is not None
        return formed(parts, gpus=gpus, rates=rates, now_s=0.0, cost=NO_COST, number=1)

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
    scene.groups = {1: scene.group([0, 1], (0,)), 2: scene.group([0], (1,))}
    assert scene.regrouping.held(scene.groups, 59.0) == {1, 2}  # so that policies know
    assert scene.regrouping.held(scene.groups, 60.0) == set()
    assert scene.admitted(SPLIT, now_s=59.0) == []
    assert scene.admitted(SPLIT, now_s=60.0) == SPLIT


def test_an_urgent_job_need_not_wait_until_others_may_move() -> None:
    scene = Scene()
    scene.queue = WaitingQueue(
        [replace(scene.waiting[2], job=replace(scene.waiting[2].job, priority=1))]
    )
    oust = [Decision(members=(2,), gpus=(0,), dissolve=(1,), pause=(0, 1))]
    scene.regrouping = MoveLimiter(Settings(policy="tlora_elastic"), scene._speeds)
    assert all(scene.admitted(oust, now_s=float(second)) for second in range(6))


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


CASES = {
    "nothing to do": ("", "", ""),
    "a gang is started where its GPUs are free": ("g1: a", "", "start g1"),
    "two targets never start on one GPU": ("g1: a; g2 0,1: b", "", "start g1"),
    "a gang that died waits before it starts again": ("g1 waits: a", "", ""),
    "jobs wait while their gang starts": ("g1: a", "g1 starting", ""),
    "jobs are prepared all at once": ("g1: a b", "g1", "prepare g1 a, prepare g1 b"),
    "a prepared job joins though another is still being prepared": (
        *("g1: a b", "g1: a=prepared b=preparing", "join g1 a"),
    ),
    "a fresh gang's first jobs join together": (
        *("g1: a b c", "g1 gathers: a=prepared b=preparing c=prepared", ""),
    ),
    "they join as soon as all are prepared": (
        *("g1: a b", "g1 gathers: a=prepared b=prepared", "join g1 a, join g1 b"),
    ),
    "a job that joins alone waits for no other": (
        *("g1 one_by_one: a b", "g1 gathers: a=prepared b=preparing", "join g1 a"),
    ),
    "no second change while a join is on its way": (*("g1: a b", "g1: a=joining b=prepared", ""),),
    "a joining job is prepared while another leaves, and joins later": (
        *("g1: a b", "g1: a=training c=leaving", "prepare g1 b"),
    ),
    "who goes leaves before who is ready joins": (
        *("g1: a b", "g1: a=training b=prepared c=training", "leave g1 c"),
    ),
    "a move waits until the old gang has let go": (
        *("g1: a b; g2 1: c", "g1: a=training; g2 1: b=training c=training", "leave g2 b"),
    ),
    "a job that left and is wanted again is prepared anew": ("g1: a", "g1: a=leaving", ""),
    "other GPUs: the old gang is stopped first": ("g2 0,1: a", "g1: a=training", "stop g1"),
    "the new gang starts when the old one is gone": ("g2 0,1: a", "g1 stopping: a=leaving", ""),
    "with memory for both, the new gang starts while jobs leave one by one": (
        *("g2 0,1 beside: a", "g1: a=training b=leaving", "leave g1 a, start g2"),
    ),
    "who has left goes on beside those who still leave": (
        *("g2 0,1: a b", "g1: b=leaving; g2 0,1", "prepare g2 a"),
    ),
    "the old gang ends behind the last one": (
        *("g2 0,1: a", "g1; g2 0,1: a=preparing", "stop g1"),
    ),
    "no gang starts beside one that a job still joins": (
        *("g2 0,1 beside: a", "g1: a=joining b=leaving", ""),
    ),
    "nor beside one that another target without room wants": (
        *("g2 beside: a; g3 1: b", "g1 0,1: a=training", "stop g1"),
    ),
    "jobs leave a gang whose GPUs no other wants": (
        *("", "g1: a=training b=preparing", "leave g1 a, leave g1 b"),
    ),
    "an idle gang is kept warm": ("", "g1 idle=59", ""),
    "not for ever": ("", "g1 idle=60", "stop g1"),
    "an idle gang makes room": ("g2 0,1: a", "g1 idle=1", "stop g1"),
    "a starting gang that no target names any more is stopped for its GPUs": (
        *("g2: a", "g1 starting", "stop g1"),
    ),
    "suspects join one by one": (
        *("g1 one_by_one: a b c", "g1: a=training b=prepared c=prepared", "join g1 b"),
    ),
    "the next one when the first round is over": (
        *("g1 one_by_one: a b", "g1 first=a: a=training b=prepared", ""),
    ),
}
"""Targets, gangs as they are, and actions: `NAME [GPUS] [WORDS]: MEMBERS`; GPU 0 where none is."""


def _parts(text: str) -> Iterator[tuple[str, tuple[int, ...], list[str], list[str]]]:
    """Name, GPUs, words and members of each part."""
    for part in filter(None, text.split("; ")):
        head, _, members = part.partition(":")
        name, *words = head.split()
        gpus = words.pop(0) if words and words[0][0].isdigit() else "0"
        yield name, tuple(map(int, gpus.split(","))), words, members.split()


def _target(name: str, gpus: tuple[int, ...], words: list[str], members: list[str]) -> Target:
    flags = {word: True for word in words if word != "waits"}
    may_start = "waits" not in words
    return Target(gang=name, gpus=gpus, members=tuple(members), may_start=may_start, **flags)


def _gang(name: str, gpus: tuple[int, ...], words: list[str], members: list[str]) -> GangNow:
    given = dict(word.split("=") for word in words if "=" in word)
    return GangNow(
        gang=name,
        gpus=gpus,
        state=next((w for w in words if w in ("starting", "stopping")), "running"),  # type: ignore[arg-type]
        members=dict(member.split("=") for member in members),  # type: ignore[misc]
        idle_s=float(given.get("idle", 0)),
        in_first_round=given.get("first", ""),
        gathers="gathers" in words,
    )


@pytest.mark.parametrize("case", CASES)
def test_next_actions(case: str) -> None:
    targets, gangs, expected = CASES[case]
    found = plan_actions(
        [_target(*part) for part in _parts(targets)],
        [_gang(*part) for part in _parts(gangs)],
        idle_keep_s=60.0,
    )
    said = [" ".join(filter(None, [a.kind, a.gang, a.job])) for a in found]
    assert ", ".join(said) == expected


def shown(service: LiveService, name: str) -> dict[str, Any]:
    return dict(service.store.boards.read()[name].body)


def test_groups_show_who_trains_beside_whom_and_how_fast(root: Path) -> None:
    service = LiveService(root)
    jobs = [service.submit(name, steps=60) for name in ("one", "two")]
    service.run(20)
    (group,) = shown(service, "groups")["groups"]
    assert (group["gang"], group["epoch"], group["state"]) == ("g1", 1, "running")
    assert [member["job"] for member in group["members"]] == jobs
    for member in group["members"]:
        assert (member["phase"], member["bound"]) == ("training", 2.0)
        assert member["slowdown"] == pytest.approx(member["predicted_slowdown"], rel=0.01)
        assert member["slowdown"] <= member["bound"]
        assert member["alone_tokens_per_s"] >= member["measured_tokens_per_s"] > 0
    total = sum(member["measured_tokens_per_s"] for member in group["members"])
    assert group["measured_tokens_per_s"] == pytest.approx(total)
    assert group["predicted_tokens_per_s"] == pytest.approx(total, rel=0.01)
    speeds = service.store.boards.speeds_of_jobs()
    assert [*speeds] == jobs
    for of_job in speeds.values():
        assert of_job["tokens_per_s"] == pytest.approx(of_job["promised_tokens_per_s"], rel=0.01)
    table = job_table(service.store.jobs.each(), speeds=speeds)
    rates = {str(column.header): [*column.cells] for column in table.columns}
    assert rates["tokens/s"] == [f"{of_job['tokens_per_s']:,.0f}" for of_job in speeds.values()]
    assert rates["promised"] != ["-", "-"]
    service.run()
    service.run(2)
    assert shown(service, "groups")["groups"][0]["members"] == []
    assert service.store.boards.speeds_of_jobs() == {}


def test_what_has_not_changed_is_not_written_again(root: Path) -> None:
    service = LiveService(root)
    service.run(30)
    before = service.store.boards.read()
    service.run(5)
    assert service.store.boards.read() == before
    service.restart()
    service.run(5)
    assert service.store.boards.read().keys() == before.keys()


def test_decisions_say_why(root: Path) -> None:
    service, first = one_job(root, steps=50)
    second = service.submit("two", steps=20)
    service.run(5)
    join, start = (decision.actions[0] for decision in service.store.decisions.newest())
    assert (start["kind"], start["jobs"]) == ("start", [first])
    speed = round(start["tokens_per_s"])
    assert start["why"] == f"1 job starts on 1 GPU: alone, {speed} tokens/s"
    assert (join["kind"], join["jobs"]) == ("join", [first, second])
    assert join["why"].startswith("1 job joins 1 on 1 GPU, where it is: ")
    assert all(slow <= bound for slow, bound in zip(join["slowdowns"], join["bounds"], strict=True))


def test_a_group_that_is_moved_or_split_is_told_apart() -> None:
    scene = Scene()
    group, beside = scene.group, scene.groups[1]
    driven = replace(scene.waiting[2].job, is_open=True)
    (one, two), three = beside.members, replace(beside.members[1], job=driven)
    mixed = action_of(replace(beside, members=(one, two, three)), [beside])
    assert mixed["bounds"] == [one.job.max_slowdown, two.job.max_slowdown, None]
    assert ", beside 1 that clients drive; the nearest" in mixed["why"]
    only = action_of(replace(beside, members=(three,)), [])
    assert only["why"].endswith(": driven by clients, it costs nothing while they think")
    old = [beside]
    actions = {
        name: action_of(new, old)
        for name, new in {
            "leave": group([0], (0,)),
            "move": group([1], (1,)),
            "start": group([2], (2,)),
            "join": group([0, 1, 2], (0,)),
        }.items()
    }
    assert {name: action["kind"] for name, action in actions.items()} == {n: n for n in actions}
    assert actions["leave"]["why"].startswith("1 job stays on 1 GPU: alone, ")
    assert actions["move"]["why"].startswith("1 job of 1 gang on 1 GPU goes to 1 GPU: ")
    assert "times slower than alone, of" in actions["join"]["why"]
