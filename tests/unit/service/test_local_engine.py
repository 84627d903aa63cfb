"""The engine of one host with ranks that train nothing: what every engine does, and workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_case import (
    FAKE,
    EngineCase,
    OpenEngine,
    command,
    is_gone,
    poll_until,
    spec,
    wait_for_pids,
)
from tests.helpers.launch import wait_until
from tlora_megatron.service.engines.local import LocalEngine, PreforkedWorker
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import GangFolder

WORKER = (sys.executable, "-m", "tests.helpers.fake_preforked")
FORKS = {"preforked": None, "worker_command": WORKER, "rank_command": ("false",)}
"""Ranks are forks of a worker, and nothing else can start."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Home.open(tmp_path / "service").root


def make_engine(root: Path, **options: Any) -> LocalEngine:
    return LocalEngine(root, 0, slots=4, **{"preforked": 0, "rank_command": FAKE, **options})


@pytest.fixture
def open_engine(root: Path) -> Iterator[OpenEngine]:
    engines = []

    def open_engine() -> LocalEngine:
        engines.append(make_engine(root))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


class TestAsEveryEngine(EngineCase):
    pass


@pytest.fixture
def engine(root: Path) -> Iterator[LocalEngine]:
    engine = make_engine(root)
    yield engine
    end_all(engine)


def end_all(engine: LocalEngine) -> None:
    for info in engine.gangs():
        assert engine.kill(info.gang, info.epoch)
    engine.close()


def started(engine: LocalEngine, root: Path) -> list[int]:
    """Starts a gang; returns its processes."""
    engine.start(spec(root))
    poll_until(engine, "started")
    return wait_for_pids(root)


def test_rank_that_said_nothing_is_told_by_its_code_and_log(
    engine: LocalEngine, root: Path
) -> None:
    engine.start(spec(root))
    engine.post(command(1, "save", rank=1, code=7))
    died = poll_until(engine, "died")[-1]
    assert died.body["reason"] == (
        "rank 1 ended with exit code 7; the last line of its log: my last words"
    )


def test_rank_that_leaves_first_ends_no_gang(engine: LocalEngine, root: Path) -> None:
    ranks = started(engine, root)
    engine.post(command(1, "save", rank=1, code=0))
    wait_until(lambda: engine.poll({}) is not None and is_gone(ranks[1]), "the end of rank 1")
    assert [info.alive for info in engine.gangs()] == [False]
    engine.post(command(2, "stop", save=True))
    assert poll_until(engine, "stopped")[-1].kind == "stopped"
    assert not engine.gangs()


def test_rank_that_fails_while_others_leave_is_to_blame(engine: LocalEngine, root: Path) -> None:
    ranks = started(engine, root)
    engine.post(command(1, "save", rank=1, code=0))
    wait_until(lambda: engine.poll({}) is not None and is_gone(ranks[1]), "the end of rank 1")
    engine.post(command(2, "save", rank=0, code=7))
    died = poll_until(engine, "died")[-1]
    assert "rank 0 ended with exit code 7" in died.body["reason"]


def test_new_engine_ends_what_is_not_whole(engine: LocalEngine, root: Path) -> None:
    ranks = started(engine, root)
    engine.close()
    assert not any(is_gone(pid) for pid in ranks)
    os.kill(ranks[1], signal.SIGKILL)
    second = make_engine(root)
    died = poll_until(second, "died")[-1]
    assert died.body["rank"] == 1
    assert is_gone(ranks[0])
    second.close()
    assert not make_engine(root).gangs()


def test_start_that_was_broken_off_is_ended(root: Path) -> None:
    GangFolder(root, "g", 1).create(spec(root))
    engine = make_engine(root)
    (died,) = engine.poll({})
    assert (died.kind, died.number) == ("died", 1)
    assert "broken off" in died.body["reason"]
    assert GangFolder(root, "g", 1).is_closed


def test_gang_that_hears_nothing_stops_by_itself(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root, lease_s=0.5))
    events = poll_until(engine, "stopped")
    assert events[-1].body == {}


def test_forks_of_a_worker_are_ranks_that_outlive_it(root: Path) -> None:
    engine = make_engine(root, **FORKS)
    ranks = started(engine, root)
    engine.close()
    second = make_engine(root)
    assert [info.alive for info in second.gangs()] == [True]
    os.kill(ranks[1], signal.SIGKILL)
    assert poll_until(second, "died")[-1].body["rank"] == 1
    end_all(second)


def test_parent_of_forks_tells_how_they_ended(root: Path) -> None:
    engine = make_engine(root, **FORKS)
    for epoch in (1, 2):
        engine.start(spec(root, gang=f"g{epoch}"))
    for gang in ("g1", "g2"):
        poll_until(engine, "started", gang=gang)
    rank_0 = int(GangFolder(root, "g2", 1).pid(0).read_text().split()[0])
    os.kill(rank_0, signal.SIGSEGV)
    assert "signal 11" in poll_until(engine, "died", gang="g2")[-1].body["reason"]
    assert [info.gang for info in engine.gangs()] == ["g1"]
    end_all(engine)


def test_worker_of_each_gpu_becomes_a_rank_and_is_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")
    engine = LocalEngine(root, 2, preforked=2, worker_command=WORKER, rank_command=("false",))
    waiting = worker_pids(engine)
    while len(waiting) < 2:
        engine.poll({})
        waiting = worker_pids(engine)
    assert started(engine, root) == [waiting[0], waiting[1]]
    assert "sits at '7'" in GangFolder(root, "g", 1).log(1).read_text()
    engine.poll({})
    assert worker_pids(engine)
    assert not set(worker_pids(engine).values()) & set(waiting.values())
    end_all(engine)


def test_workers_end_with_their_service(root: Path) -> None:
    engine = make_engine(root, preforked=1, worker_command=WORKER)
    (worker,) = engine.workers.by_slot.values()
    worker.child.pipe.close()  # as the kernel does for a service that is killed
    assert worker.child.wait() == 0


def test_workers_that_fail_are_given_up(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = (sys.executable, "-c", "raise ImportError('pip install triton')")
    engine = make_engine(root, preforked=1, worker_command=failing)
    wait_until(
        lambda: engine.poll({}) is not None and "pip install triton" in caplog.text, "its words"
    )
    assert not worker_pids(engine)
    engine.start(spec(root))
    poll_until(engine, "started")
    end_all(engine)


def worker_pids(engine: LocalEngine) -> dict[int, int]:
    return {slot: worker.child.pid for slot, worker in engine.workers.by_slot.items()}


def test_gang_that_has_stopped_is_not_taken_up_again(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    engine.post(command(1, "stop", save=True))
    count = len(poll_until(engine, "stopped"))
    assert engine.poll({}) == []
    second = make_engine(root)
    assert second.poll({}) == []
    assert not second.gangs()
    assert second.poll({("g", 1): count - 1, ("gone", 7): 0})[-1].kind == "stopped"
    end_all(second)


def test_killed_ranks_leave_no_zombies(engine: LocalEngine, root: Path) -> None:
    ranks = started(engine, root)
    assert engine.kill("g", 1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_gang_whose_processes_cannot_be_started_dies(root: Path) -> None:
    engine = make_engine(root, rank_command=(str(root / "missing"),))
    engine.start(spec(root))
    died = poll_until(engine, "died")[-1]
    assert died.body["reason"].startswith("its processes could not be started: [Errno 2]")
    end_all(engine)


def test_folder_that_a_crash_left_empty_takes_the_gang(engine: LocalEngine, root: Path) -> None:
    (root / "gangs" / "g-1").mkdir()
    engine.start(spec(root))
    poll_until(engine, "started")


def test_worker_that_has_ended_takes_no_order(tmp_path: Path) -> None:
    worker = PreforkedWorker([sys.executable, "-c", ""], os.environ, tmp_path / "log")
    worker.child.wait()
    assert not worker.order(GangFolder(tmp_path, "g", 1), 0, {})
    worker.child.kill()
