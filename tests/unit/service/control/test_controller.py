"""The controller over a store and fake gangs: jobs' lives, users' requests, and every fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_gang import FakeGang, FakeTimes
from tests.helpers.floor_model import FloorModel
from tests.helpers.live_service import FloorCost, LiveService, one_job
from tests.helpers.stored_jobs import ValidatorHere
from tlora_megatron.service.control import admit
from tlora_megatron.service.control.pricing import MemoryShares
from tlora_megatron.service.removal import act_on
from tlora_megatron.service.store import JobState, StoreError, StoreFull


def test_why_a_job_waits_is_said(root: Path) -> None:
    service = LiveService(root, policy="isolated")
    service.submit("busy", steps=400, batch=10)
    service.run(5)
    jobs = [service.submit(f"job{i}", steps=5, priority=i) for i in (0, 1)]
    service.run(5)
    second, first = (service.store.boards.why_jobs_wait()[job] for job in jobs)
    assert re.fullmatch(r"1 of 1 GPU is held by 1 job, the first free in about \d+ min", first)
    assert second == f"{first}; 1 job before it"
    service.run()
    assert service.store.boards.why_jobs_wait() == {}


def test_no_more_gpus_are_held_than_can_be_used(root: Path) -> None:
    service = LiveService(root, gpus=4, policy="isolated")
    for number in range(4):
        service.submit(f"busy{number}", steps=400, batch=10)
    service.run(5)
    job = service.submit("late", steps=5)
    assert service.controller.context.state.set_aside.put([0], service.controller.context.clock())
    service.run(5)
    assert service.store.boards.why_jobs_wait()[job].startswith("3 of 3 GPUs are held by 3 jobs,")


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_gang_starts_beside_the_one_that_it_takes_over_from(root: Path, is_killed: bool) -> None:
    """No job is lost or trained twice, also if controllers are killed again and again meanwhile."""
    cost = FloorCost(model=FloorModel(), shares=MemoryShares(0.2, 0.5), most_jobs=1)
    service = LiveService(root, cost=cost)
    service.engine.shares_gpus = True
    jobs = [service.submit("one", steps=50)]
    service.run(10)
    jobs.append(service.submit("two", steps=20))
    service.run(until=lambda: len(service.engine.all_gangs) == 2)
    for _ in range(50 if is_killed else 0):
        service.restart()
        service.run(0.1)
    service.run()
    if not is_killed:
        assert _starts_before_it_ends(service)
    assert not service.engine.doubled
    quiet = LiveService(root / "quiet")
    same = [quiet.submit("one", steps=50), quiet.submit("two", steps=20)]
    quiet.run()
    assert [service.adapter(job) for job in jobs] == [quiet.adapter(job) for job in same]


def _starts_before_it_ends(service: LiveService) -> bool:
    """True if the second gang starts while the first one is still there."""
    old, new = sorted(gang.spec.gang for gang in service.engine.all_gangs.values())
    ended = {row.name: row.ended_at for row in service.store.gangs.ended_since(0)}
    started = service.store.events.after(0, gang=new, kinds=["gang"])[0].at
    return started < (ended[old] or 0)


def test_without_memory_for_both_it_starts_behind_it(root: Path) -> None:
    cost = FloorCost(model=FloorModel(), shares=MemoryShares(0.3, 0.6), most_jobs=1)
    service = LiveService(root, cost=cost)
    service.engine.shares_gpus = True
    service.submit("one", steps=50)
    service.run(10)
    service.submit("two", steps=20)
    service.run()
    assert not _starts_before_it_ends(service)


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


def test_cancel_pause_and_resume(root: Path) -> None:
    service = LiveService(root)
    names = ("stays", "pauses", "goes")
    jobs = {name: service.submit(name, steps=40, batch=2) for name in names}
    service.run(10)
    service.store.jobs.request_action(jobs["pauses"], "pause")
    service.store.jobs.request_action(jobs["goes"], "cancel")
    service.run(5)
    assert service.states() == {"stays": "running", "pauses": "paused", "goes": "cancelled"}
    step = service.job(jobs["pauses"]).step
    assert step >= 5
    service.store.jobs.request_action(jobs["pauses"], "resume")
    service.run(5)
    assert service.job(jobs["pauses"]).state == "running"
    service.run()
    assert service.states() == {"stays": "finished", "pauses": "finished", "goes": "cancelled"}
    assert not (service.home.job(jobs["goes"]) / "adapter").exists()


def test_many_jobs_are_cancelled_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are taken in at a time, those that wait, that are new, and one that trains."""
    monkeypatch.setattr(admit, "_EVENTS", 10)
    service = LiveService(root, policy="isolated")
    jobs = [service.submit(f"job{i}", steps=500, batch=10) for i in range(25)]
    service.run(5)
    jobs.append(service.submit("new", steps=5))
    acted = act_on(service.home, service.store, "cancel", jobs, "me")
    assert (len(acted.jobs), acted.refused) == (26, {})
    service.run()
    assert service.store.jobs.counts() == {"cancelled": 26}
    whys = [event.body for event in service.store.events.after(0, kinds=["state"], job=jobs[-2])]
    assert whys[-1] == {"from": "queued", "to": "cancelled", "why": "cancelled"}


def test_no_job_is_checked_while_more_cancelled_ones_come(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admit, "_EVENTS", 10)
    service, cancelled = LiveService(root), []

    def poll(_: ValidatorHere) -> list[Any]:
        cancelled.append(service.store.jobs.counts().get(JobState.CANCELLED, 0))
        return []

    monkeypatch.setattr(ValidatorHere, "poll", poll)
    jobs = [service.submit(f"job{i}", steps=5) for i in range(25)]
    act_on(service.home, service.store, "cancel", jobs, "me")
    service.run(1)
    assert {*cancelled} == {25}


def test_old_jobs_are_removed_every_hour(root: Path) -> None:
    service = LiveService(root, keep_finished_s=10_000.0)
    old = service.submit("old", steps=5)
    service.run()
    service.now_s += 9_000
    service.submit("young", steps=5)
    service.run()
    assert service.adapter(old)
    service.now_s += 4_000
    service.run(1)
    assert service.states() == {"young": "finished"}
    service.now_s += 9_000
    service.run(1)
    assert not list(service.home.jobs.iterdir())


def test_actions_for_jobs_that_wait(root: Path) -> None:
    service = LiveService(root)
    service.submit("busy", steps=50, batch=10, max_slowdown=1.0)
    service.run(5)
    waits = service.submit("waits", steps=5, batch=10, max_slowdown=1.0)
    gone = service.submit("gone", steps=5, batch=10, max_slowdown=1.0)
    service.run(2)
    service.store.jobs.request_action(waits, "pause")
    service.store.jobs.request_action(gone, "cancel")
    service.run(2)
    assert service.states() == {"busy": "running", "waits": "paused", "gone": "cancelled"}
    service.store.jobs.request_action(waits, "resume")
    service.run()
    assert service.states() == {"busy": "finished", "waits": "finished", "gone": "cancelled"}


def test_a_pause_taken_back_while_the_job_still_leaves(root: Path) -> None:
    service, job = one_job(root, steps=40, run_s=15, times=FakeTimes(boundary_s=3.0))
    service.store.jobs.request_action(job, "pause")
    service.run(1)
    service.store.jobs.request_action(job, "resume")
    service.run()
    assert service.job(job).state == "finished"


def test_a_gang_that_dies_starts_again_from_checkpoints(root: Path) -> None:
    service = LiveService(root, times=FakeTimes(checkpoint_s=5.0))
    alone = LiveService(root.parent / "alone")
    jobs = [service.submit(name, steps=40) for name in ("one", "two")]
    same = [alone.submit(name, steps=40) for name in ("one", "two")]
    alone.run()
    service.run(22)
    gang = service.gang
    gang.die("rank 1 was killed by signal 9")
    service.run()
    assert [service.adapter(job) for job in jobs] == [alone.adapter(job) for job in same]
    assert {row.name: row.step for row in map(service.job, jobs)} == {"one": 40, "two": 40}
    assert len(service.engine.all_gangs) == 2
    said = service.sentences("rank_died")
    assert len(said) == 1
    assert "killed by signal 9" in said[0]
    assert "one, two" in said[0]


def test_a_new_job_that_takes_all_memory_trains_alone(root: Path) -> None:
    service = LiveService(root, policy="tlora_best")
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


@pytest.mark.parametrize("restarts", [False, True])
def test_several_new_jobs_join_one_by_one_to_find_the_one_at_fault(
    root: Path, restarts: bool
) -> None:
    service = LiveService(root)
    jobs = [service.submit(name, steps=30, batch=2) for name in ("one", "two", "three")]
    service.engine.hungry.add(jobs[1])
    service.run(until=lambda: len(service.engine.all_gangs) == 2)
    if restarts:
        service.restart()
    service.run()
    assert set(service.states().values()) == {"finished"}
    said = service.sentences("quarantined")
    assert said[1].startswith("job 'two' made gang")
    assert [words.partition(":")[2] for words in said] == [
        " they join one by one, to find the one at fault",
        " it trains alone from now on, and the others go on without it",
    ]


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


@pytest.mark.parametrize("hangs", [False, True])
def test_gangs_are_ended_though_the_store_cannot_be_written(
    root: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    service, _ = one_job(root, times=FakeTimes(checkpoint_s=1e6))
    (gang,) = service.engine.all_gangs.values()
    gang.hangs = hangs

    def pass_time(seconds: float) -> None:
        service.now_s += seconds

    def refuse() -> None:
        raise StoreError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr("tlora_megatron.service.control.controller.time.sleep", pass_time)
        patch.setattr(service.store, "transaction", refuse)
        service.controller.end_gangs()
    assert not gang.alive
    assert "refuses to write (database is locked): gangs are told" in service.said[0]
    assert len(service.said) == 1 + hangs
    assert any(event.kind == "saved" for event in gang.events) is not hangs
    service.restart()
    service.run()
    assert service.states() == {"one": "finished"}


def test_an_engine_that_does_not_answer(root: Path) -> None:
    service, _ = one_job(root)
    service.engine.lost = "the head node is gone"
    service.run(10)
    assert "does not answer (the head node is gone)" in service.said[-1]
    service.engine.lost = None
    service.submit("two", steps=5)
    service.run()
    assert set(service.states().values()) == {"finished"}
    assert service.sentences("recovered")


def test_gangs_of_nobody_are_ended(root: Path) -> None:
    service, _ = one_job(root, steps=30)
    key = next(iter(service.engine.all_gangs))
    service.engine.start(
        service.store.gangs.get(*key).spec.__class__(
            gang="stranger", epoch=7, base_model={}, parallel={}, run={}, gpus=((0, 0),), root="/"
        )
    )
    service.run(15)
    assert not service.engine.all_gangs["stranger", 7].alive
    assert "is unknown to the store" in service.sentences("stranger")[0]
    service.run()


def test_a_job_that_fits_nowhere_is_refused_with_its_remedy(root: Path) -> None:
    service = LiveService(root)
    job = service.submit("wide", steps=5, gpus=2)
    service.run(1)
    error = "must hold at most as many GPUs as the service has, 1, got 2: submit it with a smaller"
    assert error in str(service.job(job).error)


@pytest.mark.parametrize("restarts", [False, True])
def test_failed_saves_pause_a_job(root: Path, restarts: bool) -> None:
    service, job = one_job(root)
    gang = service.gang
    for step in (4, 5):
        gang.tell("not_saved", job, step=step, error="no space left on device")
        service.run(3)
        if restarts:
            service.restart()
    service.run(3)
    assert service.job(job).state == "paused"
    assert [line.split(": ")[1] for line in service.sentences("not_saved")] == [
        "no space left on device; it trains on",
        "no space left on device; it is paused",
    ]


def test_a_store_that_refuses_to_write_stops_only_what_is_new(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, job = one_job(root, steps=30)
    hear = service.store.gangs.hear

    def full(events: object) -> list[object]:
        raise StoreFull("database or disk is full")

    monkeypatch.setattr(service.store.gangs, "hear", full)
    service.run(5)
    for step in (4, 5, 6):  # behind the second the job would be paused
        service.gang.tell("not_saved", job, step=step, error="no space left on device")
    service.run(5)
    assert "the store refuses to write" in service.said[-1]
    monkeypatch.setattr(service.store.gangs, "hear", hear)
    service.run(3)
    assert service.job(job).state == "running"
    service.run()
    assert service.states() == {"one": "finished"}


def test_first_jobs_of_a_gang_join_together_but_wait_for_no_late_one(root: Path) -> None:
    service = LiveService(root, times=FakeTimes(prepare_s=0.2))
    later, took = service.engine.later, iter([0.1, 0.5, 8.0])

    def uneven(seconds: float, gang: FakeGang, what: Callable[[], None]) -> None:
        later(next(took) if seconds == 0.2 else seconds, gang, what)

    service.engine.later = uneven  # type: ignore[method-assign]
    jobs = [service.submit(name, steps=60, batch=2) for name in ("one", "two", "late")]
    service.run(30)
    one, two, late = (service.job(job).started_at or 0.0 for job in jobs)
    prepared = service.store.events.after(0, job=jobs[1], kinds=["seat"])[0]
    assert one == two == pytest.approx(prepared.at + 0.5, abs=0.1)
    assert late > one + 6


def test_a_gang_that_waits_to_start_again_starts_on_time(root: Path) -> None:
    service = LiveService(root, look_s=1000.0, tick_s=1000.0)
    service.submit("one", steps=5)
    for _ in range(2):
        service.run(until=lambda: any(gang.alive for gang in service.engine.all_gangs.values()))
        service.gang.die("no reason")
        died_s = service.now_s
    service.run()
    assert service.now_s < died_s + 20
