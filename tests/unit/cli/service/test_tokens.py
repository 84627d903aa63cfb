"""`tlora token`: made once, listed without secrets, revoked; limits of tenants."""

from __future__ import annotations

import pytest

from tests.helpers.commands import Tlora
from tests.helpers.stored_jobs import put_job
from tlora_megatron.service.store import Store


def test_a_token_is_shown_once_and_can_be_taken_back(store: Store, tlora: Tlora) -> None:
    secret = tlora("token", "create", "ann", "--gpus", "2", "--requests-per-s", "9.5").strip()
    assert secret.startswith("tml-tlora-")
    assert len(secret) == len("tml-tlora-") + 43
    found = store.tokens.find(secret)
    assert found is not None
    assert (found.tenant, found.scopes) == ("ann", ("submit", "read"))
    assert (store.tenants.limits("ann").gpus, store.tenants.limits("ann").jobs) == (2, 1000)
    (row,) = tlora.json("token", "list")
    assert row["id"] == found.id
    assert secret not in str(row)
    assert found.id in tlora("token", "list")
    tlora("token", "revoke", found.id)
    assert store.tokens.find(secret) is None


def test_limits_are_changed_one_by_one(store: Store, tlora: Tlora) -> None:
    assert "bob: gpus all, jobs 7, upload_bytes 10000000000" in tlora(
        "token", "limit", "bob", "--jobs", "7"
    )
    assert tlora.json("token", "limit", "bob", "--upload-bytes", "5") == {
        "gpus": None,
        "jobs": 7,
        "upload_bytes": 5,
        "requests_per_s": 50.0,
    }


def test_whoever_serves_finds_a_tenant_s_job_by_its_id_alone(store: Store, tlora: Tlora) -> None:
    job = put_job(store, "theirs")
    tlora("cancel", "theirs", code=2)
    tlora("cancel", job)
    assert store.jobs.get(job).wish == "cancel"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["create", "../ann"], "a tenant's name must be at most 32 lower-case letters"),
        (["create", "ann", "--scope", "all"], "a scope must be one of"),
        (["create", "ann", "--jobs", "-1"], "--jobs must be at least 0, got -1"),
        (["revoke", "t0"], "a token's id must be one of the store's, got 't0'; `tlora token list`"),
    ],
)
def test_mistakes_are_refused_and_make_nothing(
    store: Store, tlora: Tlora, argv: list[str], sentence: str
) -> None:
    assert sentence in tlora("token", *argv, code=2)
    assert store.tokens.all() == []
