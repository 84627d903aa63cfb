"""The promises of a store, on SQLite and on PostgreSQL."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.helpers.stored_jobs import put_job
from tests.unit.service.store.conftest import Clock
from tlora_megatron.service.messages import GangEvent, GangSpec
from tlora_megatron.service.store import (
    JOB_CHANGES,
    OVER,
    GangState,
    IllegalChange,
    Job,
    JobState,
    KeyReused,
    LeaseHeld,
    LockHeld,
    LockLost,
    NameTaken,
    NewJob,
    NotFound,
    Progress,
    Store,
    StoreError,
    events,
    open_store,
)


def new(name: str, **fields: object) -> NewJob:
    made = NewJob(name=name, document={"name": name, "lr": 1e-3}, base="tiny", key=f"key {name}")
    return replace(made, **fields)


def submitted(store: Store, name: str = "a") -> Job:
    (job,) = store.jobs.submit([new(name)])
    return job


def queued(store: Store, name: str = "a") -> Job:
    return store.jobs.change(submitted(store, name).id, JobState.QUEUED)


def gang(store: Store, name: str = "g", lease_s: float = 600.0) -> int:
    epoch = store.gangs.next_epoch(name)
    spec = {"base_model": {}, "parallel": {"tp": 1}, "run": {}, "gpus": ((0, 1),), "root": "/r"}
    store.gangs.add(GangSpec(gang=name, epoch=epoch, lease_s=lease_s, **spec))
    return epoch


def running(store: Store, name: str = "a") -> Job:
    job = queued(store, name)
    store.leases.grant(job.id, "g", 1)
    store.jobs.change(job.id, JobState.STARTING)
    return store.jobs.change(job.id, JobState.RUNNING)


class TestSubmit:
    def test_a_key_makes_one_job_and_answers_with_it_again(self, store: Store) -> None:
        first, other = store.jobs.submit([new("a"), new("b")])
        assert (first.is_new, first.state, first.number) == (True, JobState.VALIDATING, 1)
        assert store.jobs.document(other.id) == {"name": "b", "lr": 1e-3}
        store.jobs.change(first.id, JobState.QUEUED, document={"changed": True})
        again, third = store.jobs.submit([new("a"), new("c")])
        assert (again.id, again.is_new, again.state) == (first.id, False, JobState.QUEUED)
        assert third.is_new
        assert [e.kind for e in store.events.after(0)].count("submitted") == 3

    def test_the_same_key_twice_in_one_submit_is_one_job(self, store: Store) -> None:
        one, two = store.jobs.submit([new("a"), new("a")])
        assert one == two
        assert sum(store.jobs.counts().values()) == 1

    def test_a_key_with_another_job_is_refused(self, store: Store) -> None:
        submitted(store)
        with pytest.raises(KeyReused, match=r"same job again, got 'key a' of job 'a' \(j1"):
            store.jobs.submit([new("b"), new("a", base="other")])
        with pytest.raises(KeyReused, match="must belong to one job, got 'key b'"):
            store.jobs.submit([new("b"), new("c", key="key b")])
        assert sum(store.jobs.counts().values()) == 1, "all or none"

    def test_a_name_is_free_again_when_its_job_is_over(self, store: Store) -> None:
        job = submitted(store)
        with pytest.raises(NameTaken, match=r"'a', which is j1\w{4} and validating"):
            store.jobs.submit([new("a", key="other")])
        with pytest.raises(NameTaken, match="unlike names, got 2 of 'b'"):
            store.jobs.submit([new("b", key="x"), new("b", key="y")])
        (foreign,) = store.jobs.submit([new("a")], tenant="other")
        assert foreign.is_new
        store.jobs.change(job.id, JobState.FAILED, error="no data")
        (second,) = store.jobs.submit([new("a", key="other")])
        assert store.jobs.find("a").id == second.id
        store.jobs.change(second.id, JobState.CANCELLED)
        assert store.jobs.find("a").id == second.id, "the newest"
        assert store.jobs.find(job.id).error == "no data"
        with pytest.raises(NotFound, match=f"'{foreign.id}'"):
            store.jobs.find(foreign.id)

    def test_numbers_that_json_has_not_become_null(self, store: Store) -> None:
        (job,) = store.jobs.submit([new("a", document={"x": [math.inf, 1]})])
        assert store.jobs.document(job.id) == {"x": [None, 1]}


class TestChanges:
    def test_a_job_s_life_with_its_events(self, store: Store, clock: Clock) -> None:
        gang(store)
        job, beside = running(store), running(store, "b")
        clock.now += 5
        reports = [Progress(job=one.id, step=3, tokens=70, loss=0.5) for one in (job, beside)]
        store.jobs.progress(reports)
        assert store.jobs.get(beside.id).step == 3
        store.jobs.progress([Progress(job=job.id, step=4, tokens=80, num_steps=9)])
        over = store.jobs.change(job.id, JobState.FINISHED, release="ended", why="last step")
        assert (over.step, over.loss, over.num_steps, over.lease) == (4, 0.5, 9, None)
        assert (over.started_at, over.ended_at) == (1000.0, 1005.0)
        assert over == store.jobs.get(job.id)
        store.jobs.progress([Progress(job=job.id, step=5, tokens=90)])
        assert store.jobs.get(job.id).step == 4, "a late report changes nothing"
        told = store.events.after(0, job=job.id)
        assert [e.body["to"] for e in told if e.kind == "state"] == [
            "queued",
            "starting",
            "running",
            "finished",
        ]
        assert told[-1].body["why"] == "last step"
        assert {e.gang for e in told if e.kind in ("granted", "released")} == {"g"}

    def test_the_page_shows_what_may_follow(self, repo: Path) -> None:
        rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", (repo / "docs/store.md").read_text(), re.M)
        shown = {state: set(re.findall(r"`(\w+)`", others)) for state, others in rows}
        always = {JobState.FAILED, JobState.CANCELLED}
        assert shown == {s: set(JOB_CHANGES[s] - always) for s in JobState if s not in OVER}
        assert not any(JOB_CHANGES[state] for state in OVER)

    def test_illegal_changes_name_job_from_and_to(self, store: Store) -> None:
        job = submitted(store)
        before = store.events.last()
        with pytest.raises(IllegalChange, match=rf"'a' \({job.id}\) must go from validating to"):
            store.jobs.change(job.id, JobState.RUNNING)
        assert store.events.last() == before

    def test_a_live_job_has_a_lease_and_no_other_has(self, store: Store) -> None:
        gang(store)
        job = queued(store)
        with pytest.raises(IllegalChange, match="must be leased to a gang to become starting"):
            store.jobs.change(job.id, JobState.STARTING)
        store.leases.grant(job.id, "g", 1)
        store.jobs.change(job.id, JobState.STARTING)
        with pytest.raises(IllegalChange, match="must give its lease back to become failed"):
            store.jobs.change(job.id, JobState.FAILED)

    def test_a_transaction_is_kept_whole_or_not_at_all(self, store: Store) -> None:
        job = submitted(store)
        before = store.events.last()
        with suppress(NotFound), store.transaction():
            store.jobs.change(job.id, JobState.QUEUED)
            store.jobs.change("j9zzzz", JobState.QUEUED)
        assert store.jobs.get(job.id).state is JobState.VALIDATING
        assert store.events.last() == before
        with store.transaction():
            store.jobs.change(job.id, JobState.QUEUED)
            with pytest.raises(IllegalChange):
                store.jobs.change(job.id, JobState.RUNNING)
        assert store.jobs.get(job.id).state is JobState.QUEUED

    def test_actions_are_reported_kept_and_fulfilled(self, store: Store) -> None:
        gang(store)
        job = running(store)
        before = store.events.last()
        store.jobs.request_action(job.id, "pause", by="me")
        assert [(e.kind, e.body["wish"]) for e in store.events.after(before)] == [
            ("wished", "pause")
        ]
        assert store.jobs.get(job.id).wish == "pause"
        assert store.jobs.change(job.id, JobState.PAUSED, release="left").wish is None
        store.jobs.request_action(job.id, "resume")
        assert store.jobs.change(job.id, JobState.QUEUED).wish is None
        store.jobs.request_action(job.id, "cancel")
        with pytest.raises(IllegalChange, match="on its way to being cancelled to pause"):
            store.jobs.request_action(job.id, "pause")
        store.jobs.change(job.id, JobState.CANCELLED)
        with pytest.raises(IllegalChange, match="unfinished to pause, got one that is cancelled"):
            store.jobs.request_action(job.id, "pause")

    def test_removed_jobs_are_in_no_list_and_documents_say_what_they_need(
        self, store: Store
    ) -> None:
        jobs = {name: put_job(store, name, document=body) for name, body in _NEEDS.items()}
        found = store.jobs.documents_with_folders()
        assert found == {jobs[name]: _NEEDS[name] for name in ("starts", "base")}
        store.jobs.change(jobs["none"], JobState.FAILED)
        needed = {jobs["base"]: "x needs"}
        acted = store.jobs.remove([jobs["none"], jobs["base"]], needed=needed)
        assert [job.id for job in acted.jobs] == [jobs["none"]] == list(store.jobs.removed())
        assert store.jobs.get(jobs["none"]).removed_at == acted.jobs[0].removed_at == 1000.0
        assert jobs["none"] not in [job.id for job in store.jobs.each()]
        with pytest.raises(NotFound):
            store.jobs.find("none", tenant="ann")
        assert not store.jobs.cancel_waiting([jobs["base"], jobs["starts"]])[0].wish
        assert store.jobs.counts(tenant="ann") == {JobState.CANCELLED: 2}


_NEEDS = {
    "starts": {"document": {"init_from": "/x", "resume_from": None}},
    "base": {"base_model": {"path": "/s/jobs/j1abcd/merged"}},
    "none": {"document": {"init_from": None, "resume_from": None}},
}


def _count(store: Store, table: str) -> int:
    with store.database.read() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


def _event(name: str, number: int) -> GangEvent:
    return GangEvent(gang=name, epoch=1, number=number, at=0.0, kind="note")


class TestGangs:
    def test_a_name_has_one_gang_alive_and_epochs_without_a_gap(self, store: Store) -> None:
        assert gang(store) == 1
        with pytest.raises(IllegalChange, match="must have ended to start again, got epoch 1"):
            gang(store)
        store.gangs.change("g", 1, GangState.RUNNING)
        store.gangs.note("g", 1, pid=7)
        store.gangs.change("g", 1, GangState.ENDED, why="rank 1 was killed")
        with pytest.raises(IllegalChange, match="must go from ended to nothing else, got running"):
            store.gangs.change("g", 1, GangState.RUNNING)
        with pytest.raises(IllegalChange, match="must be alive to be told to save, got epoch 1"):
            store.commands.write("g", 1, "save")
        assert gang(store) == 2
        assert [(g.epoch, g.spec.gpus) for g in store.gangs.live()] == [(2, ((0, 1),))]
        assert store.gangs.get("g", 1).why == "rank 1 was killed"
        assert store.gangs.get("g", 1).engine_ref == {"pid": 7}

    def test_events_count_once_and_in_order(self, store: Store) -> None:
        gang(store)
        told = _event("g", 1)
        assert store.gangs.hear([told]).new == [told]
        assert store.gangs.hear([told, replace(told, gang="unknown")]) == ([], {})
        assert store.gangs.cursor() == {("g", 1): 1}

    def test_a_gap_concerns_its_gang_alone(self, store: Store) -> None:
        gang(store, "g")
        gang(store, "h")
        g, h = [[_event(name, number) for number in (1, 2, 3)] for name in ("g", "h")]
        heard = store.gangs.hear([g[0], h[0], g[2], h[1], g[1]])
        assert heard.new == [g[0], h[0], h[1]]
        assert heard.missed == {("g", 1): "told event 3 before event 2"}
        assert store.gangs.cursor() == {("g", 1): 1, ("h", 1): 2}

    def test_commands_are_numbered_and_renew_the_lease(self, store: Store, clock: Clock) -> None:
        gang(store, lease_s=50.0)
        clock.now += 20
        first = store.commands.write("g", 1, "prepare", job="j1", body={"lease": 2})
        with suppress(NotFound), store.transaction():
            store.commands.write("g", 1, "stop")
            store.jobs.get("j9zzzz")
        second = store.commands.write("g", 1, "renew")
        assert [first.seq, second.seq] == [1, 2]
        assert store.gangs.get("g", 1).lease_until == 1070.0
        assert store.load().commands == [first, second]
        assert store.commands.mark_applied("g", 1, 1)
        assert not store.commands.mark_applied("g", 1, 1)
        assert store.load().commands == [second]
        with pytest.raises(NotFound, match="got number 3 of gang 'g'"):
            store.commands.mark_applied("g", 1, 3)


class TestLeases:
    def test_no_two_gangs_may_write_a_job_and_epochs_grow(self, store: Store, clock: Clock) -> None:
        gang(store, "g", lease_s=60.0)
        gang(store, "h")
        job = running(store)
        with pytest.raises(LeaseHeld, match=r"given back by gang 'g' of epoch 1 before gang 'h'"):
            store.leases.grant(job.id, "h", 1)
        clock.now += 71
        assert store.leases.grant(job.id, "h", 1).epoch == 2, "g was told nothing for too long"
        assert store.leases.release(job.id, lease=2, why="left")
        assert store.leases.grant(job.id, "g", 1).epoch == 3
        store.gangs.change("g", 1, GangState.ENDED)
        assert store.leases.grant(job.id, "h", 1).epoch == 4, "its gang has ended"
        assert not store.leases.release(job.id, lease=3, why="late")
        assert store.leases.release(job.id, lease=4, why="left")
        assert store.leases.of(job.id) is None
        with pytest.raises(IllegalChange, match="must be alive to be leased job 'a'"):
            store.leases.grant(job.id, "g", 1)
        lease = store.leases.grant(job.id, "h", 1)
        assert lease.epoch == 5
        assert store.leases.all() == [lease]
        found = store.jobs.get(job.id)
        assert (found.gang, found.gang_epoch, found.lease) == ("h", 1, 5)

    def test_a_job_that_is_over_gets_none(self, store: Store) -> None:
        gang(store)
        job = queued(store)
        store.jobs.change(job.id, JobState.CANCELLED)
        with pytest.raises(IllegalChange, match="must be unfinished to be leased to gang 'g'"):
            store.leases.grant(job.id, "g", 1)


class TestReaders:
    def test_pages_follow_each_other(self, store: Store) -> None:
        made = [job.id for job in store.jobs.submit([new(f"n{i}") for i in range(7)])]
        for job in made[::2]:
            store.jobs.change(job, JobState.QUEUED)
        seen, after = [], None
        while page := store.jobs.page(states={JobState.QUEUED}, after=after, limit=3):
            seen += [job.id for job in page]
            after = page[-1].number
        assert seen == made[::2]
        backwards = store.jobs.page(newest_first=True, after=3)
        assert [job.id for job in backwards] == [made[1], made[0]]
        assert store.jobs.counts() == {JobState.QUEUED: 4, JobState.VALIDATING: 3}
        assert store.jobs.page(tenant="other") == []

    def test_events_of_a_job_after_a_number(self, store: Store) -> None:
        assert store.events.last() == 0
        job = submitted(store)
        submitted(store, "b")
        mark = store.events.last()
        store.events.add("note", job=job.id, body={"message": "hello"})
        store.jobs.change(job.id, JobState.QUEUED)
        store.jobs.progress([Progress(job=job.id, step=1, tokens=1)])
        assert store.events.last() == mark + 2
        assert [e.kind for e in store.events.after(mark, job=job.id)] == ["note", "state"]
        assert [e.body for e in store.events.after(0, kinds=["note"])] == [{"message": "hello"}]
        assert [e.seq for e in store.events.after(0, limit=1)] == [1]

    def test_old_events_go_but_for_those_of_unfinished_jobs(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "_AT_ONCE", 2)
        over, waits = queued(store), queued(store, "b")
        store.jobs.change(over.id, JobState.CANCELLED)
        clock.now += events.KEPT_S - 10
        store.events.add("note", body={"message": "young"})
        assert not store.events.forget_old()
        clock.now += 20
        while store.events.forget_old():
            pass
        left = store.events.after(0)
        assert [e.job for e in left] == [waits.id, waits.id, None]
        assert store.events.last() == left[-1].seq

    def test_no_more_events_than_some_are_kept(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "KEPT", 2)
        for number in range(5):
            store.events.add("note", body={"number": number})
        assert not store.events.forget_old()
        assert [e.body["number"] for e in store.events.after(0)] == [3, 4]

    def test_load_is_all_that_is_unfinished(self, store: Store, place: str) -> None:
        gang(store)
        gang(store, "old")
        over, left = running(store), running(store, "b")
        store.commands.write("old", 1, "save")
        store.gangs.change("old", 1, GangState.ENDED)
        store.jobs.change(over.id, JobState.FINISHED, release="ended")
        told = store.commands.write("g", 1, "join", job=left.id)
        with open_store(place) as other:
            found = other.load()
        assert [job.id for job in found.jobs] == [left.id]
        assert [g.name for g in found.gangs] == ["g"]
        assert list(found.commands) == [told]
        assert [lease.job for lease in found.leases] == [left.id]
        assert found.last_event == store.events.last()

    def test_commands_of_gangs_long_gone_are_removed(self, store: Store, clock: Clock) -> None:
        gang(store)
        store.commands.write("g", 1, "renew")
        store.gangs.change("g", 1, GangState.ENDED)
        gang(store)
        store.commands.write("g", 2, "renew")
        assert _count(store, "command") == 2
        clock.now += 90_000
        gang(store, "h")
        assert [(c.epoch, c.seq) for c in store.load().commands] == [(2, 1)]
        assert _count(store, "command") == 1

    def test_the_newest_decisions_are_kept(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "DECISIONS_KEPT", 2)
        store.decisions.add({}, [], "start")
        store.decisions.add({"queued": 2}, ["join"], "arrival")
        store.decisions.add({}, [], "tick")
        newest = store.decisions.newest()
        assert [found.why for found in newest] == ["tick", "arrival"]
        assert store.decisions.newest(before=newest[0].seq) == newest[1:]

    def test_a_board_shows_the_last_that_was_written(self, store: Store, clock: Clock) -> None:
        store.boards.write("groups", {"groups": [1]})
        store.boards.write("figures", {})
        clock.now += 5
        store.boards.write("groups", {"groups": []})
        shown = store.boards.read()
        assert {name: board.body for name, board in shown.items()} == {
            "groups": {"groups": []},
            "figures": {},
        }
        assert shown["groups"].at == shown["figures"].at + 5

    def test_what_ran_since_a_time(self, store: Store, clock: Clock) -> None:
        begin = clock.now
        job = queued(store).id
        gang(store, "g")
        lease = store.leases.grant(job, "g", 1)
        clock.now += 10
        store.leases.release(job, lease=lease.epoch, why="left")
        (stay,) = store.leases.stays_since(begin)
        assert (stay.job, stay.gang, stay.gang_epoch) == (job, "g", 1)
        assert (stay.since, stay.until) == (begin, begin + 10)
        assert not store.leases.stays_since(begin + 10)
        assert [found.name for found in store.gangs.since(begin + 100)] == ["g"]


class TestLock:
    def test_one_controller_at_a_time(self, store: Store, place: str, clock: Clock) -> None:
        job = submitted(store)
        first = store.lock.take()
        with open_store(place, clock=clock) as other:
            with pytest.raises(LockHeld, match=r"one controller, got process \d+ of .*0 s ago"):
                other.lock.take()
            clock.now += 14
            store.lock.beat()
            clock.now += 14
            assert other.lock.is_held()
            clock.now += 2
            assert other.lock.take() == first + 1
            for write in (
                store.lock.beat,
                lambda: store.jobs.change(job.id, JobState.QUEUED),
                lambda: submitted(store, "b"),
            ):
                with pytest.raises(LockLost, match="epoch 1 where 2 is the present one"):
                    write()
            other.lock.release()
            assert not other.lock.is_held()
        assert store.lock.take() == 3
        assert store.jobs.change(job.id, JobState.QUEUED).state is JobState.QUEUED

    def test_a_view_takes_no_change(self, store: Store) -> None:
        with store.database.read(), pytest.raises(StoreError, match="not be made inside a read"):
            submitted(store)
