"""The controller over a store and fake gangs: jobs' lives, wishes, and every fault."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.live_service import LiveService, folder_in_memory
from tlora_megatron.service.engines.fake_gang import FakeTimes
from tlora_megatron.service.engines.protocol import NodeInfo

_EVERY_S = [0.07, 0.31, 1.3, 4.1] if os.environ.get("TLORA_ALL_TESTS") else [1.3]


@pytest.fixture
def root() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder / "service"


def test_a_job_trains_and_ends(root: Path) -> None:
    service = LiveService(root)
    job = service.submit("one", steps=20)
    service.run()
    row = service.job(job)
    assert (row.state, row.step, row.lease) == ("finished", 20, None)
    assert len(service.adapter(job)) == 64
    kinds = [event.kind for event in service.store.events.after(0, job=job)]
    assert kinds[0] == "submitted"
    assert kinds.index("granted") < kinds.index("released")


def test_a_job_joins_the_gang_that_runs(root: Path) -> None:
    service = LiveService(root)
    first = service.submit("one", steps=50)
    service.run(10)
    second = service.submit("two", steps=20)
    service.run(5)
    assert service.states() == {"one": "running", "two": "running"}
    assert service.job(first).gang == service.job(second).gang
    service.run()
    assert len(service.engine.all_gangs) == 1


def test_an_idle_gang_is_kept_warm_and_taken_again(root: Path) -> None:
    service = LiveService(root, idle_keep_s=100)
    service.submit("one", steps=5)
    service.run()
    service.run(50)
    second = service.submit("two", steps=5)
    service.run()
    assert len(service.engine.all_gangs) == 1
    assert service.job(second).state == "finished"
    service.run(150)
    assert not service.store.gangs.live()


def test_jobs_that_would_slow_each_other_too_much_wait(root: Path) -> None:
    service = LiveService(root)
    for name in ("one", "two", "three"):
        service.submit(name, steps=30, batch=10, max_slowdown=1.2)
    service.run(10)
    assert sorted(service.states().values()) == ["queued", "queued", "running"]
    service.run()
    assert set(service.states().values()) == {"finished"}


def test_cancel_pause_and_resume(root: Path) -> None:
    service = LiveService(root)
    names = ("stays", "pauses", "goes")
    jobs = {name: service.submit(name, steps=40, batch=2) for name in names}
    service.run(10)
    service.store.jobs.wish(jobs["pauses"], "pause")
    service.store.jobs.wish(jobs["goes"], "cancel")
    service.run(5)
    assert service.states() == {"stays": "running", "pauses": "paused", "goes": "cancelled"}
    step = service.job(jobs["pauses"]).step
    assert step >= 5
    service.store.jobs.wish(jobs["pauses"], "resume")
    service.run(5)
    assert service.job(jobs["pauses"]).state == "running"
    service.run()
    assert service.states() == {"stays": "finished", "pauses": "finished", "goes": "cancelled"}
    assert not (service.home.job(jobs["goes"]) / "adapter").exists()


def test_wishes_of_jobs_that_wait(root: Path) -> None:
    service = LiveService(root)
    service.submit("busy", steps=50, batch=10, max_slowdown=1.0)
    service.run(5)
    waits = service.submit("waits", steps=5, batch=10, max_slowdown=1.0)
    gone = service.submit("gone", steps=5, batch=10, max_slowdown=1.0)
    service.run(2)
    service.store.jobs.wish(waits, "pause")
    service.store.jobs.wish(gone, "cancel")
    service.run(2)
    assert service.states() == {"busy": "running", "waits": "paused", "gone": "cancelled"}
    service.store.jobs.wish(waits, "resume")
    service.run()
    assert service.states() == {"busy": "finished", "waits": "finished", "gone": "cancelled"}


def test_a_pause_taken_back_while_the_job_still_leaves(root: Path) -> None:
    service = LiveService(root, times=FakeTimes(boundary_s=3.0))
    job = service.submit("one", steps=40)
    service.run(15)
    service.store.jobs.wish(job, "pause")
    service.run(1)
    service.store.jobs.wish(job, "resume")
    service.run()
    assert service.job(job).state == "finished"


def test_a_gang_that_dies_starts_again_from_checkpoints(root: Path) -> None:
    service = LiveService(root, times=FakeTimes(checkpoint_s=5.0))
    alone = LiveService(root.parent / "alone")
    jobs = [service.submit(name, steps=40) for name in ("one", "two")]
    same = [alone.submit(name, steps=40) for name in ("one", "two")]
    alone.run()
    service.run(22)
    gang = next(iter(service.engine.all_gangs.values()))
    gang.die("rank 1 was killed by signal 9")
    service.run()
    assert [service.adapter(job) for job in jobs] == [alone.adapter(job) for job in same]
    assert {row.name: row.step for row in map(service.job, jobs)} == {"one": 40, "two": 40}
    assert len(service.engine.all_gangs) == 2
    said = service.sentences("rank_died")
    assert len(said) == 1
    assert "killed by signal 9" in said[0]
    assert "one, two" in said[0]


def test_a_newcomer_that_takes_all_memory_trains_alone(root: Path) -> None:
    service = LiveService(root)
    first = service.submit("first", steps=60)
    service.run(10)
    hungry = service.submit("hungry", steps=10)
    service.engine.hungry.add(hungry)
    service.run(20)
    assert service.job(first).state == "running"
    assert service.sentences("quarantined")[0].startswith("job 'hungry' made gang")
    service.run()
    assert set(service.states().values()) == {"finished"}
    assert not service.engine.doubled


def test_several_newcomers_join_one_by_one_to_find_the_one_at_fault(root: Path) -> None:
    service = LiveService(root)
    jobs = [service.submit(name, steps=30, batch=2) for name in ("one", "two", "three")]
    service.engine.hungry.add(jobs[1])
    service.run()
    assert set(service.states().values()) == {"finished"}
    said = service.sentences("quarantined")
    assert "they join one by one" in said[0]
    assert said[1].startswith("job 'two' made gang")


def test_a_job_that_kills_every_gang_fails_alone(root: Path) -> None:
    service = LiveService(root)
    service.submit("good", steps=60)
    bad = service.submit("bad", steps=60)

    def poison() -> bool:
        for gang in service.engine.all_gangs.values():
            if gang.alive and bad in gang.jobs and gang.jobs[bad].phase == "training":
                gang.die("illegal memory access")
        return service.is_over

    service.run(until=poison)
    assert service.states() == {"good": "finished", "bad": "failed"}
    assert "must not end the process that trains it" in str(service.job(bad).error)
    assert "illegal memory access" in str(service.job(bad).error)


def test_a_gang_that_cannot_start_fails_its_jobs_with_the_reason(root: Path) -> None:
    service = LiveService(root)
    job = service.submit("one", steps=5)

    def break_it() -> bool:
        for gang in service.engine.all_gangs.values():
            if gang.alive:
                gang.die("no such model folder")
        return service.is_over

    service.run(until=break_it)
    assert service.job(job).state == "failed"
    assert "the last one: no such model folder" in str(service.job(job).error)
    assert len(service.engine.all_gangs) == service.settings.max_deaths


def test_a_hung_gang_is_killed_and_started_again(root: Path) -> None:
    service = LiveService(root, hang_s=30)
    job = service.submit("one", steps=60)
    service.run(10)
    next(iter(service.engine.all_gangs.values())).hangs = True
    service.run()
    assert service.job(job).state == "finished"
    assert "said nothing for 30 s" in service.sentences("hung")[0]


def test_a_machine_that_is_gone_and_comes_back(root: Path) -> None:
    service = LiveService(root, nodes=2)
    for name in ("one", "two"):
        service.submit(name, steps=60, batch=10, max_slowdown=1.0)
    service.run(10)
    assert set(service.states().values()) == {"running"}
    service.engine.machines[1] = NodeInfo(node=1, address="", gpus=1, healthy=False)
    service.run(20)
    assert sorted(service.states().values()) == ["queued", "running"]
    assert service.sentences("node_down")
    service.engine.machines[1] = NodeInfo(node=1, address="", gpus=1)
    service.run(20)
    assert set(service.states().values()) == {"running"}
    service.run()
    assert set(service.states().values()) == {"finished"}


def test_an_engine_that_does_not_answer(root: Path) -> None:
    service = LiveService(root)
    service.submit("one", steps=60)
    service.run(10)
    service.engine.lost = "the head node is gone"
    service.run(10)
    assert "does not answer (the head node is gone)" in service.said[-1]
    service.engine.lost = None
    service.submit("two", steps=5)
    service.run()
    assert set(service.states().values()) == {"finished"}
    assert service.sentences("recovered")


def test_gangs_of_nobody_are_ended(root: Path) -> None:
    service = LiveService(root)
    service.submit("one", steps=30)
    service.run(10)
    key = next(iter(service.engine.all_gangs))
    service.engine.start(
        service.store.gangs.get(*key).spec.__class__(
            gang="stranger", epoch=7, base_model={}, parallel={}, run={}, gpus=((0, 0),), root="/"
        )
    )
    service.run(15)
    assert not service.engine.all_gangs["stranger", 7].alive
    assert "belongs to nobody" in service.sentences("stranger")[0]
    service.run()


def test_a_job_that_fits_nowhere_is_refused_with_its_remedy(root: Path) -> None:
    service = LiveService(root)
    service.controller.desk.pricing.meet("base", {})
    job = service.submit("wide", steps=5, gpus=2)
    service.run(1)
    told = "must hold at most as many GPUs as the service has, 1, got 2: submit it with a smaller"
    assert told in str(service.job(job).error)


def test_failed_saves_pause_a_job(root: Path) -> None:
    service = LiveService(root)
    job = service.submit("one", steps=60)
    service.run(10)
    gang = next(iter(service.engine.all_gangs.values()))
    for _ in range(2):
        gang.tell("not_saved", job, step=4, error="no space left on device")
        service.run(3)
    assert service.job(job).state == "paused"
    assert [line.split(": ")[1] for line in service.sentences("not_saved")] == [
        "no space left on device; it trains on",
        "no space left on device; it is paused",
    ]


def test_a_store_that_refuses_to_write_stops_only_what_is_new(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tlora_megatron.service.store import StoreFull

    service = LiveService(root)
    service.submit("one", steps=30)
    service.run(10)
    hear = service.store.gangs.hear_all

    def full(events: object) -> list[object]:
        raise StoreFull("database or disk is full")

    monkeypatch.setattr(service.store.gangs, "hear_all", full)
    service.run(10)
    assert "the store refuses to write" in service.said[-1]
    monkeypatch.setattr(service.store.gangs, "hear_all", hear)
    service.run()
    assert service.states() == {"one": "finished"}


@pytest.mark.parametrize("every_s", _EVERY_S)
def test_controllers_that_are_killed_again_and_again(root: Path, every_s: float) -> None:
    names = ("one", "two", "three", "four")
    service = LiveService(root, gpus=2)
    jobs = [service.submit(name, steps=12 + 5 * i, batch=6) for i, name in enumerate(names)]
    for _ in range(int(60 / every_s)):
        service.run(every_s)
        if service.is_over:
            break
        service.restart()
    service.run()
    assert set(service.states().values()) == {"finished"}
    assert not service.engine.doubled
    quiet = LiveService(root.parent / "quiet", gpus=2)
    same = [quiet.submit(name, steps=12 + 5 * i, batch=6) for i, name in enumerate(names)]
    quiet.run()
    assert [service.adapter(job) for job in jobs] == [quiet.adapter(job) for job in same]
