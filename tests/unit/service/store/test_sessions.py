"""Sessions, tokens, limits and files of tenants in a store, and writers that are killed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.helpers.launch import python
from tests.helpers.session import ALL_TESTS
from tests.unit.service.store.conftest import Clock
from tests.unit.service.store.test_store import submitted
from tlora_megatron.service.store import (
    CheckpointNote,
    Model,
    NewUpload,
    NotFound,
    OverLimit,
    Sampler,
    Session,
    Store,
    StoreFull,
    open_store,
)


def a_session(store: Store, name: str = "s", **more: Any) -> Session:
    now = store.database.clock()
    made = Session(id=name, tenant="ann", created_at=now, sdk_version="1", heard_at=now, **more)
    store.sessions.add(made)
    return made


def a_model(job: str, session: str = "s") -> Model:
    return Model(
        id=f"{session}:train:0",
        tenant="ann",
        session=session,
        number=0,
        job=job,
        base="b",
        created_at=5.0,
        rank=4,
        train_mlp=False,
        user_metadata={"a": "b"},
    )


def a_sampler(session: str = "s", **more: Any) -> Sampler:
    row = {"tenant": "ann", "session": session, "number": 0, "heard_at": 5.0, "base": "b"}
    return Sampler(id=f"{session}:sample:0", **row, **more)


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
    assert store.sessions.sampler(sampler.id, tenant="ann") == sampler
    assert store.sessions.sampler(sampler.id, tenant="bob") is None
    assert store.sessions.pinned("bob") == []


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


def _file(letter: str, size: int = 10) -> NewUpload:
    return NewUpload(
        id=f"file-{letter * 24}",
        name=f"{letter}.jsonl",
        purpose="fine-tune",
        digest=hashlib.sha256(letter.encode()).hexdigest(),
        size=size,
        facts={"rows": 3},
    )


def test_tokens_are_found_by_their_secret_until_they_are_revoked(
    store: Store, clock: Clock
) -> None:
    first = store.tokens.make("ann")
    clock.now += 1  # those of one moment are listed in any order
    second = store.tokens.make("bob", ["admin", "read"])
    assert first.secret != second.secret
    assert store.tokens.find(first.secret) == first.token
    assert second.token.scopes == ("read", "admin")
    for wrong in ("", "x", first.secret[:-1], first.secret + " ", "\udcff"):
        assert store.tokens.find(wrong) is None
    clock.now += 5
    assert store.tokens.revoke(first.token.id).revoked_at == clock.now
    clock.now += 5
    assert store.tokens.revoke(first.token.id).revoked_at == clock.now - 5
    assert store.tokens.find(first.secret) is None
    assert [token.tenant for token in store.tokens.all()] == ["ann", "bob"]
    assert [token.id for token in store.tokens.all("bob")] == [second.token.id]
    with pytest.raises(NotFound, match="a token's id must be one of the store's, got 't0'"):
        store.tokens.revoke("t0")
    with pytest.raises(ValueError, match="a tenant's name must be at most 32"):
        store.tokens.make("Ann")


def test_uploads_are_a_tenant_s_own_and_count_until_they_are_deleted(store: Store) -> None:
    for letter in "abc":
        store.uploads.add(_file(letter), tenant="ann", most_bytes=30)
    store.uploads.add(_file("d"), tenant="bob", most_bytes=30)
    with pytest.raises(OverLimit, match="at most 30 bytes together, got 30 and 10 more"):
        store.uploads.add(_file("e"), tenant="ann", most_bytes=30)
    assert store.uploads.bytes_of("ann") == 30
    names = [file.name for file in store.uploads.page(tenant="ann")]
    assert names == ["c.jsonl", "b.jsonl", "a.jsonl"]
    after = store.uploads.page(tenant="ann", after=_file("b").id, newest_first=False)
    assert [file.name for file in after] == ["c.jsonl"]
    assert store.uploads.page(tenant="ann", purpose="batch") == []
    deleted = store.uploads.delete(_file("b").id, tenant="ann")
    assert deleted.facts == {"rows": 3}
    assert store.uploads.bytes_of("ann") == 20
    assert [f.name for f in store.uploads.page(tenant="ann", after=deleted.id)] == ["a.jsonl"]
    for tenant, letter in (("ann", "b"), ("ann", "d"), ("bob", "a")):
        with pytest.raises(NotFound, match="a file's id must be one of yours"):
            store.uploads.get(_file(letter).id, tenant=tenant)
        with pytest.raises(NotFound):
            store.uploads.delete(_file(letter).id, tenant=tenant)
    with pytest.raises(NotFound):
        store.uploads.page(tenant="bob", after=_file("a").id)


def test_no_acknowledged_submit_is_lost_or_made_twice(place: str) -> None:
    kills = 40 if ALL_TESTS else 4
    counted = json.loads(
        python("-m", "tests.helpers.store_chaos", place, kills, 7).splitlines()[-1]
    )
    assert counted["acknowledged"] >= kills
