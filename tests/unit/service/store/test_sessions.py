"""Sessions of Tinker's clients in the store, on SQLite and on PostgreSQL."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.launch import HANG_S, REPO
from tests.unit.service.store.conftest import Clock
from tests.unit.service.store.test_store import new, submitted
from tlora_megatron.service.store import (
    CheckpointNote,
    Model,
    Sampler,
    Session,
    Store,
    StoreFull,
    open_store,
)


def a_session(store: Store, name: str = "s", tenant: str = "ann", **more: Any) -> Session:
    now = store.database.clock()
    made = Session(id=name, tenant=tenant, created_at=now, sdk_version="1", heard_at=now, **more)
    store.sessions.add(made)
    return made


def a_model(job: str, session: str = "s", tenant: str = "ann", number: int = 0) -> Model:
    return Model(
        id=f"{session}:train:{number}",
        tenant=tenant,
        session=session,
        number=number,
        job=job,
        base="b",
        created_at=5.0,
        rank=4,
        train_mlp=False,
        user_metadata={"a": "b"},
    )


def a_sampler(number: int = 0, session: str = "s", **more: Any) -> Sampler:
    id = f"{session}:sample:{number}"
    row = {"id": id, "tenant": "ann", "session": session, "number": number, "heard_at": 5.0}
    return Sampler(**row, base="b", **more)


def test_rows_come_back_as_they_were_written(store: Store) -> None:
    session = a_session(store, user_metadata={"x": "y"}, display_name="d")
    model, sampler = a_model(submitted(store).id), a_sampler(version="j1@2", model_path="p")
    note = CheckpointNote(model=model.id, kind="weights", name="n", created_at=1.0, expires_at=2.0)
    store.sessions.add_model(model)
    store.sessions.put_sampler(sampler)
    store.sessions.note(note)
    assert store.sessions.get("s", tenant="ann") == session
    assert store.sessions.model(model.id, tenant="ann") == model
    assert store.sessions.models(tenant="ann", session="s") == [model]
    assert store.sessions.samplers("s") == store.sessions.pinned("ann") == [sampler]
    assert store.sessions.notes(model.id) == {("weights", "n"): note}
    assert store.sessions.leave(model, 7) == store.sessions.model(model.id, tenant="ann")


def test_another_tenant_finds_nothing(store: Store) -> None:
    a_session(store)
    store.sessions.add_model(a_model(submitted(store).id))
    store.sessions.put_sampler(a_sampler(version="j1@1"))
    sessions = store.sessions
    assert sessions.get("s", tenant="bob") is None
    assert sessions.model("s:train:0", tenant="bob") is None
    assert sessions.sampler("s:sample:0", tenant="bob") is None
    assert sessions.all("bob") == sessions.models(tenant="bob") == sessions.pinned("bob") == []


def test_a_note_and_a_sampler_are_written_over(store: Store) -> None:
    a_session(store)
    model = a_model(submitted(store).id)
    store.sessions.add_model(model)
    for at in (1.0, 2.0):
        row = {"model": model.id, "kind": "weights", "name": "n"}
        store.sessions.note(CheckpointNote(**row, created_at=at))
        store.sessions.put_sampler(a_sampler(model_path=str(at)))
    assert store.sessions.notes(model.id)["weights", "n"].created_at == 2.0
    assert store.sessions.sampler("s:sample:0", tenant="ann").model_path == "2.0"
    assert [store.sessions.join_sampler("s:sample:0") for _ in range(2)] == [1, 2]
    store.sessions.forget_note(model.id, "weights", "n")
    assert store.sessions.notes(model.id) == {}


def test_the_first_reason_of_an_end_stays(store: Store, clock: Clock) -> None:
    a_session(store)
    store.sessions.put_sampler(a_sampler(version="j1@1"))
    for why in ("first", "second"):
        clock.now += 1
        store.sessions.end("s", why)
    ended = store.sessions.get("s", tenant="ann")
    assert ended is not None
    assert (ended.ended, ended.ended_at) == ("first", 1001.0)
    assert store.sessions.pinned("ann") == []


def test_a_session_is_removed_with_all_that_is_its_own(store: Store) -> None:
    for name in ("s", "t"):
        a_session(store, name)
        model = a_model(submitted(store, name).id, name)
        store.sessions.add_model(model)
        store.sessions.put_sampler(a_sampler(session=name))
        row = {"model": model.id, "kind": "weights", "name": "n"}
        store.sessions.note(CheckpointNote(**row, created_at=1.0))
    store.sessions.remove("s")
    assert [row.id for row in store.sessions.all()] == ["t"]
    assert [row.session for row in store.sessions.models(tenant="ann")] == ["t"]
    assert (store.sessions.samplers("s"), store.sessions.notes("s:train:0")) == ([], {})
    assert (len(store.sessions.samplers("t")), len(store.sessions.notes("t:train:0"))) == (1, 1)
    assert len(store.jobs.page()) == 2


def test_what_is_heard_is_known_here_at_once_and_elsewhere_after_a_flush(
    store: Store, place: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, sampler = a_session(store), a_sampler()
    store.sessions.put_sampler(sampler)
    clock.now = 2000.0
    for of in (session.id, sampler.id):
        store.sessions.hear(of)

    def elsewhere() -> list[float]:
        with open_store(place) as other:
            found = [other.sessions.get("s", tenant="ann"), *other.sessions.samplers("s")]
            return [other.sessions.heard_at(row) for row in found if row is not None]

    assert [store.sessions.heard_at(row) for row in (session, sampler)] == [2000.0, 2000.0]
    assert elsewhere() == [1000.0, 5.0]
    with monkeypatch.context() as full:
        full.setattr(store.database, "write", _full)
        with pytest.raises(StoreFull):
            store.sessions.flush()
    store.sessions.flush()
    assert elsewhere() == [2000.0, 2000.0]
    monkeypatch.setattr(store.database, "write", _full)
    store.sessions.flush()  # there is nothing to write


def _full() -> None:
    raise StoreFull("the disk must have room")


def test_a_kill_between_a_job_and_its_model_leaves_neither(store: Store, place: str) -> None:
    a_session(store)
    code = (
        "import os, signal, sys\n"
        "from tests.unit.service.store.test_store import new\n"
        "from tlora_megatron.service.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "with store.transaction():\n"
        "    store.jobs.submit([new('a')])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, place], cwd=REPO, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL
    assert (store.jobs.page(), store.events.last()) == ([], 0)
    with store.transaction():
        (job,) = store.jobs.submit([new("a")])
        store.sessions.add_model(a_model(job.id))
    assert job.is_new
    assert [row.job for row in store.sessions.models(tenant="ann")] == [job.id]
