"""The engine of one host, with ranks that train nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S
from tlora_megatron.service.engines.local import LocalEngine, PreforkedWorker
from tlora_megatron.service.messages import Command, GangEvent, GangFolder, GangSpec

FAKE = (sys.executable, "-m", "tests.helpers.fake_rank")
FAKE_WORKER = (sys.executable, "-m", "tests.helpers.fake_preforked")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "service"


@pytest.fixture
def engine(root: Path) -> Iterator[LocalEngine]:
    engine = make_engine(root)
    yield engine
    end_all(engine)


def make_engine(root: Path, **options: object) -> LocalEngine:
    return LocalEngine(root, 0, slots=4, **{"preforked": 0, "rank_command": FAKE, **options})  # type: ignore[arg-type]


def end_all(engine: LocalEngine) -> None:
    for info in engine.gangs():
        assert engine.kill(info.gang, info.epoch)
    engine.close()


def spec(root: Path, gang: str = "g", epoch: int = 1, size: int = 2, **more: object) -> GangSpec:
    places = tuple((0, slot) for slot in range(size))
    return GangSpec(
        gang=gang,
        epoch=epoch,
        base_model={},
        parallel={},
        run={},
        gpus=places,
        root=str(root),
        **more,  # type: ignore[arg-type]
    )


def poll_until(
    engine: LocalEngine, is_there: Callable[[list[GangEvent]], bool], gang: str = "g"
) -> list[GangEvent]:
    """Polls, from the first event on, until the gang's events satisfy."""
    events: list[GangEvent] = []
    end_s = time.monotonic() + HANG_S
    while not is_there(events):
        assert time.monotonic() < end_s, events
        epoch = max((event.epoch for event in events), default=1)
        cursor = {(gang, epoch): events[-1].number if events else 0}
        events += [event for event in engine.poll(cursor) if event.gang == gang]
        time.sleep(0.005)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    return events


def has(kind: str) -> Callable[[list[GangEvent]], bool]:
    return lambda events: any(event.kind == kind for event in events)


def command(seq: int, kind: str = "renew", **body: object) -> Command:
    return Command(gang="g", epoch=1, seq=seq, kind=kind, body=body)  # type: ignore[arg-type]


def pids(root: Path, size: int = 2) -> list[int]:
    folder = GangFolder(root, "g", 1)
    return [int(folder.pid(rank).read_text().split()[0]) for rank in range(size)]


def wait_for_pids(engine: LocalEngine, root: Path) -> list[int]:
    poll_until(engine, has("started"))
    folder, end_s = GangFolder(root, "g", 1), time.monotonic() + HANG_S
    while not all(folder.pid(rank).exists() for rank in range(2)):
        assert time.monotonic() < end_s
        time.sleep(0.005)
    return pids(root)


def test_gang_carries_out_each_command_once_and_stops(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    engine.start(spec(root))
    for seq in (1, 2, 2, 1, 3):
        engine.post(command(seq))
    engine.post(command(4, "stop", save=True))
    events = poll_until(engine, has("stopped"))
    assert [event.body["seq"] for event in events if event.kind == "applied"] == [1, 2, 3, 4]
    assert not engine.gangs(), "it is told when no process is left"
    assert [event.kind for event in engine.poll({("g", 1): 0})][-1] == "stopped"
    assert engine.poll({}) == []
    assert engine.kill("g", 1)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_takes_its_gang_along(engine: LocalEngine, root: Path, victim: int) -> None:
    engine.start(spec(root))
    ranks = wait_for_pids(engine, root)
    os.kill(ranks[victim], signal.SIGKILL)
    (died,) = [event for event in poll_until(engine, has("died")) if event.kind == "died"]
    assert died.body["rank"] == victim
    assert "signal 9" in died.body["reason"]
    assert "sits at ''" in died.body["reason"]
    assert not died.body["out_of_memory"]
    assert died.body["was_killed"]
    assert all(is_gone(pid) for pid in ranks)
    assert not engine.gangs()


def test_rank_that_failed_says_why(engine: LocalEngine, root: Path) -> None:
    ending = {
        "reason": "no memory for it",
        "out_of_memory": True,
        "newcomers": ["j7"],
        "is_lost": False,
        "at": 1.0,
    }
    engine.start(spec(root))
    engine.post(command(1, "save", rank=1, code=3, ending=ending))
    died = poll_until(engine, has("died"))[-1]
    assert died.job == "j7"
    assert died.body == {
        "rank": 1,
        "reason": "no memory for it",
        "out_of_memory": True,
        "newcomers": ["j7"],
    }


def test_rank_that_said_nothing_is_told_by_its_code_and_log(
    engine: LocalEngine, root: Path
) -> None:
    engine.start(spec(root))
    engine.post(command(1, "save", rank=1, code=7))
    died = poll_until(engine, has("died"))[-1]
    assert died.body["reason"] == (
        "rank 1 ended with exit code 7; the last line of its log: my last words"
    )


def test_rank_that_leaves_first_ends_no_gang(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    ranks = wait_for_pids(engine, root)
    engine.post(command(1, "save", rank=1, code=0))
    end_s = time.monotonic() + HANG_S
    while not is_gone(ranks[1]):
        assert time.monotonic() < end_s
        engine.poll({})
    assert [info.alive for info in engine.gangs()] == [False]
    engine.post(command(2, "stop", save=True))
    assert poll_until(engine, has("stopped"))[-1].kind == "stopped"
    assert not engine.gangs()


def test_rank_that_fails_while_others_leave_is_to_blame(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    ranks = wait_for_pids(engine, root)
    engine.post(command(1, "save", rank=1, code=0))
    end_s = time.monotonic() + HANG_S
    while not is_gone(ranks[1]):
        assert time.monotonic() < end_s
        engine.poll({})
    engine.post(command(2, "save", rank=0, code=7))
    died = poll_until(engine, has("died"))[-1]
    assert "rank 0 ended with exit code 7" in died.body["reason"]


def test_new_engine_takes_up_what_lives(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    ranks = wait_for_pids(engine, root)
    engine.post(command(1))
    poll_until(engine, has("applied"))
    engine.close()

    second = make_engine(root)
    assert [(info.gang, info.epoch, info.alive) for info in second.gangs()] == [("g", 1, True)]
    second.post(command(1))
    second.post(command(2))
    events = poll_until(second, lambda events: len(events) == 3)
    assert [event.body.get("seq") for event in events] == [None, 1, 2]
    os.kill(ranks[1], signal.SIGKILL)
    died = poll_until(second, has("died"))[-1]
    assert died.body["rank"] == 1
    assert "rank 1 has ended" in died.body["reason"] or "signal 9" in died.body["reason"]
    end_all(second)


def test_new_engine_ends_what_is_not_whole(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    ranks = wait_for_pids(engine, root)
    engine.close()
    os.kill(ranks[1], signal.SIGKILL)
    second = make_engine(root)
    died = poll_until(second, has("died"))[-1]
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


def test_past_gangs_are_read_where_the_cursor_names_them(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    poll_until(engine, has("started"))
    assert engine.kill("g", 1)
    engine.close()
    second = make_engine(root)
    assert second.poll({}) == []
    assert [event.kind for event in second.poll({("g", 1): 1})] == ["died"]


def test_gang_that_hears_nothing_stops_by_itself(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root, lease_s=0.5))
    events = poll_until(engine, has("stopped"))
    assert events[-1].body == {}


def test_forks_of_a_worker_are_ranks_that_outlive_it(root: Path) -> None:
    engine = make_engine(root, preforked=None, worker_command=FAKE_WORKER, rank_command=("false",))
    engine.start(spec(root))
    ranks = wait_for_pids(engine, root)
    engine.close()
    second = make_engine(root)
    assert [info.alive for info in second.gangs()] == [True]
    os.kill(ranks[1], signal.SIGKILL)
    assert poll_until(second, has("died"))[-1].body["rank"] == 1
    end_all(second)


def test_parent_of_forks_tells_how_they_ended(root: Path) -> None:
    engine = make_engine(root, preforked=None, worker_command=FAKE_WORKER, rank_command=("false",))
    for epoch in (1, 2):
        engine.start(spec(root, gang=f"g{epoch}"))
    for gang in ("g1", "g2"):
        poll_until(engine, has("started"), gang)
    rank_0 = int(GangFolder(root, "g2", 1).pid(0).read_text().split()[0])
    os.kill(rank_0, signal.SIGSEGV)
    assert "signal 11" in poll_until(engine, has("died"), "g2")[-1].body["reason"]
    assert [info.gang for info in engine.gangs()] == ["g1"]
    end_all(engine)


def test_worker_of_each_gpu_becomes_a_rank_and_is_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")
    engine = LocalEngine(root, 2, preforked=2, worker_command=FAKE_WORKER, rank_command=("false",))
    waiting = worker_pids(engine)
    while len(waiting) < 2:
        engine.poll({})
        waiting = worker_pids(engine)
    engine.start(spec(root))
    assert wait_for_pids(engine, root) == [waiting[0], waiting[1]]
    assert "sits at '7'" in GangFolder(root, "g", 1).log(1).read_text()
    engine.poll({})
    assert worker_pids(engine)
    assert not set(worker_pids(engine).values()) & set(waiting.values())
    end_all(engine)


def test_workers_end_with_their_service(root: Path) -> None:
    engine = make_engine(root, preforked=1, worker_command=FAKE_WORKER)
    (worker,) = engine.workers.by_slot.values()
    worker.child.pipe.close()  # as the kernel does for a service that is killed
    assert worker.child.wait() == 0


def test_workers_that_fail_are_given_up(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = (sys.executable, "-c", "raise ImportError('pip install triton')")
    engine = make_engine(root, preforked=1, worker_command=failing)
    end_s = time.monotonic() + HANG_S
    while "pip install triton" not in caplog.text:
        assert time.monotonic() < end_s
        engine.poll({})
    assert not worker_pids(engine)
    engine.start(spec(root))
    poll_until(engine, has("started"))
    end_all(engine)


def test_places_must_be_those_of_the_host(engine: LocalEngine, root: Path) -> None:
    with pytest.raises(ValueError, match=r"different ones on nodes with \[4\] places"):
        engine.start(spec(root, size=5))
    assert engine.nodes()[0].gpus == 4


def worker_pids(engine: LocalEngine) -> dict[int, int]:
    return {slot: worker.child.pid for slot, worker in engine.workers.by_slot.items()}


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_gang_that_has_stopped_is_not_taken_up_again(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    engine.post(command(1, "stop", save=True))
    count = len(poll_until(engine, has("stopped")))
    second = make_engine(root)
    assert second.poll({}) == []
    assert not second.gangs()
    assert second.poll({("g", 1): count - 1})[-1].kind == "stopped"
    end_all(second)


def test_killed_ranks_leave_no_zombies(engine: LocalEngine, root: Path) -> None:
    engine.start(spec(root))
    ranks = wait_for_pids(engine, root)
    assert engine.kill("g", 1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_gang_whose_processes_cannot_be_started_dies(root: Path) -> None:
    engine = make_engine(root, rank_command=(str(root / "missing"),))
    engine.start(spec(root))
    died = poll_until(engine, has("died"))[-1]
    assert died.body["reason"].startswith("its processes could not be started: [Errno 2]")
    end_all(engine)


def test_folder_that_a_crash_left_empty_takes_the_gang(engine: LocalEngine, root: Path) -> None:
    (root / "gangs" / "g-1").mkdir()
    engine.start(spec(root))
    poll_until(engine, has("started"))


def test_worker_that_has_ended_takes_no_order(tmp_path: Path) -> None:
    worker = PreforkedWorker([sys.executable, "-c", ""], os.environ, tmp_path / "log")
    worker.child.wait()
    assert not worker.order(GangFolder(tmp_path, "g", 1), 0, {})
    worker.child.kill()
