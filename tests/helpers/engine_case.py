"""Tests that every engine passes, with ranks that train nothing (`fake_rank`).

A file of tests derives a class from `EngineCase` and gives it the fixture `open_engine`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import wait_until
from tlora_megatron.service.engines.base import GangEngine
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import Command, GangEvent, GangFolder, GangSpec

FAKE = (sys.executable, "-m", "tests.helpers.fake_rank")

OpenEngine = Callable[[], GangEngine]
"""Opens another engine on the same folder, as a controller does that is started again."""


class EngineCase:
    """Tests of the six calls."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return Home.open(tmp_path / "service").root

    @pytest.fixture
    def engine(self, open_engine: OpenEngine) -> Iterator[GangEngine]:
        engine = open_engine()
        yield engine
        for info in engine.gangs():
            engine.kill(info.gang, info.epoch)

    def test_nodes(self, engine: GangEngine) -> None:
        nodes = engine.nodes()
        assert [node.node for node in nodes] == list(range(len(nodes)))
        assert all(node.healthy and node.gpus >= 2 and node.address for node in nodes)

    def test_commands_are_carried_out_once(self, engine: GangEngine, root: Path) -> None:
        engine.start(spec(root))
        engine.start(spec(root))
        for seq in (1, 2, 2, 1, 3):
            engine.post(command(seq))
        engine.post(command(4, "stop", save=True))
        events = poll_until(engine, "stopped")
        assert [event.body["seq"] for event in events if event.kind == "applied"] == [1, 2, 3, 4]
        assert not engine.gangs(), "it is told when no process is left"
        assert not engine.poll({("g", 1): len(events)})
        assert engine.poll({("g", 1): len(events) - 1}) == events[-1:]
        assert not engine._gangs, "nothing is kept of those that are over"  # type: ignore[attr-defined]
        engine.start(spec(root))
        assert not engine.gangs(), "its epoch is over"
        assert engine.kill("g", 1)

    @pytest.mark.parametrize("victim", [0, 1])
    def test_killed_rank_takes_its_gang_along(
        self, engine: GangEngine, root: Path, victim: int
    ) -> None:
        engine.start(spec(root))
        poll_until(engine, "started")
        ranks = wait_for_pids(root)
        os.kill(ranks[victim], signal.SIGKILL)
        died = poll_until(engine, "died")[-1]
        assert died.body["rank"] == victim
        assert "signal 9" in died.body["reason"]
        assert not died.body["out_of_memory"]
        assert died.body["was_killed"]
        assert all(is_gone(pid) for pid in ranks)
        assert not engine.gangs()
        engine.start(spec(root, epoch=2))
        events = poll_until(engine, "started", epoch=2)
        assert [event.epoch for event in events] == [2]

    def test_rank_that_failed_says_why(self, engine: GangEngine, root: Path) -> None:
        ending = {"reason": "no memory for it", "out_of_memory": True, "newcomers": ["j7"]}
        engine.start(spec(root))
        words = ending | {"is_lost": False, "at": 1.0}
        engine.post(command(1, "save", rank=1, code=3, ending=words))
        died = poll_until(engine, "died")[-1]
        assert died.job == "j7"
        assert died.body == {"rank": 1, **ending}

    def test_kill_is_with_proof(self, engine: GangEngine, root: Path) -> None:
        engine.start(spec(root))
        poll_until(engine, "started")
        ranks = wait_for_pids(root)
        assert engine.kill("g", 1)
        assert all(is_gone(pid) for pid in ranks)
        assert poll_until(engine, "died")[-1].body["reason"] == "the service has ended it"
        assert not engine.gangs()

    def test_new_engine_takes_up_what_lives(
        self, engine: GangEngine, open_engine: OpenEngine, root: Path
    ) -> None:
        engine.start(spec(root))
        engine.post(command(1))
        poll_until(engine, "applied")
        ranks = wait_for_pids(root)
        second = open_engine()
        assert [(info.gang, info.epoch, info.alive) for info in second.gangs()] == [("g", 1, True)]
        second.post(command(1))
        second.post(command(2))
        events = poll_until(second, "applied", count=2)
        assert [event.body.get("seq") for event in events] == [None, 1, 2]
        assert not any(is_gone(pid) for pid in ranks)
        os.kill(ranks[1], signal.SIGKILL)
        assert poll_until(second, "died")[-1].body["rank"] == 1
        assert all(is_gone(pid) for pid in ranks)

    def test_places_must_be_there(self, engine: GangEngine, root: Path) -> None:
        with pytest.raises(ValueError, match="places of gang g must be different ones on nodes"):
            engine.start(spec(root, places=((0, 0), (0, 10_000))))
        assert not engine.gangs()


def spec(
    root: Path,
    *,
    gang: str = "g",
    epoch: int = 1,
    places: tuple[tuple[int, int], ...] = ((0, 0), (0, 1)),
    **more: Any,
) -> GangSpec:
    """A gang that needs no base."""
    words = {"base_model": {}, "parallel": {}, "run": {}, **more}
    return GangSpec(gang=gang, epoch=epoch, gpus=places, root=str(root), **words)


def command(seq: int, kind: str = "renew", **body: object) -> Command:
    return Command(gang="g", epoch=1, seq=seq, kind=kind, body=body)  # type: ignore[arg-type]


def poll_until(
    engine: GangEngine, kind: str, *, gang: str = "g", epoch: int = 1, count: int = 1
) -> list[GangEvent]:
    """The gang's events from the first one on, once there are `count` of a kind."""
    events: list[GangEvent] = []

    def is_there() -> bool:
        key = (gang, epoch)
        news = engine.poll({key: events[-1].number if events else 0})
        events.extend(event for event in news if (event.gang, event.epoch) == key)
        assert kind == "died" or all(event.kind != "died" for event in events), events
        return sum(event.kind == kind for event in events) >= count

    wait_until(is_there, f"event {kind} of gang {gang}")
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    return events


def wait_for_pids(root: Path, size: int = 2) -> list[int]:
    """The processes of the gang's first epoch."""
    folder = GangFolder(root, "g", 1)
    wait_until(lambda: all(folder.pid(rank).exists() for rank in range(size)), "all ranks")
    return [int(folder.pid(rank).read_text().split()[0]) for rank in range(size)]


def is_gone(pid: int) -> bool:
    """True if the process has ended, whether or not anybody has asked how."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
