"""Tokens, limits and files of tenants: nobody finds what is another's."""

from __future__ import annotations

import hashlib

import pytest

from tests.unit.service.store.conftest import Clock
from tlora_megatron.service.store import (
    JobState,
    NewJob,
    NewUpload,
    NotFound,
    OverLimit,
    Store,
    TenantLimits,
)


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


def test_limits_of_a_tenant_and_of_the_others(store: Store) -> None:
    assert store.tenants.limits("ann") == TenantLimits()
    store.tenants.set_limits("ann", TenantLimits(gpus=2))
    store.tenants.set_limits("ann", TenantLimits(gpus=3, jobs=1))
    assert store.tenants.all_limits() == {"ann": TenantLimits(gpus=3, jobs=1)}
    assert store.tenants.limits("bob") == TenantLimits()


def test_unfinished_jobs_count_and_known_keys_do_not(store: Store) -> None:
    def submit(name: str) -> str:
        new = NewJob(name=name, document={}, base="b", key=name)
        return store.jobs.submit([new], tenant="ann", most_unfinished=2)[0].id

    first = submit("a")
    submit("b")
    assert submit("a") == first, "it was there before"
    with pytest.raises(OverLimit, match="at most 2 unfinished jobs, got 2 and 1 more"):
        submit("c")
    store.jobs.submit([NewJob(name="c", document={}, base="b", key="c")], tenant="bob")
    store.jobs.change(first, JobState.CANCELLED)
    submit("c")
