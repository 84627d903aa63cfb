"""The values that a controller shows: machines, groups, itself, the reasons of its decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.floor_model import FREE, World
from tests.helpers.live_service import LiveService
from tlora_megatron.scheduler.formation import Parts, formed
from tlora_megatron.scheduler.queue import Group, Waiting
from tlora_megatron.service.control.show import action_of


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
    service.run()
    service.run(2)
    assert shown(service, "groups")["groups"][0]["members"] == []


def test_machines_and_figures(root: Path) -> None:
    service = LiveService(root, nodes=2, gpus=4)
    service.submit("one", steps=30)
    service.run(10)
    cluster, figures = shown(service, "cluster"), shown(service, "figures")
    assert [(node["gpus"], node["healthy"]) for node in cluster["nodes"]] == [(4, True)] * 2
    assert (figures["gpus_held"], figures["gpus_used"], figures["waiting"]) == (1, 1, 0)
    assert figures["decide"]["count"] >= 1
    assert figures["join"]["count"] == figures["start"]["count"] == 1
    service.controller.context.state.set_aside.put([5], service.now_s)
    service.run(2)
    (aside,) = shown(service, "cluster")["set_aside"]
    assert (aside["node"], aside["gpu"]) == (1, 1)


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
    service = LiveService(root)
    first = service.submit("one", steps=50)
    service.run(10)
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
    world = World(gpus_per_node=4)
    jobs = [world.add(0, 100, batch=10), world.add(0, 100, batch=10), world.add(0, 50)]
    waiting = [Waiting(job=job, tokens_left=job.tokens, queued_s=0.0) for job in jobs]

    def group(members: list[int], gpus: tuple[int, ...]) -> Group:
        parts = Parts(joining=tuple(waiting[index] for index in members))
        rates = world.speeds.rates(parts.kinds, len(gpus))
        assert rates is not None
        return formed(parts, gpus=gpus, rates=rates, now_s=0.0, cost=FREE, number=1)

    driven = replace(jobs[2], is_open=True)
    beside = group([0, 1], (0,))
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
