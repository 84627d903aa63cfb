"""`tlora token`: made once, listed without secrets, revoked; limits of tenants."""

from __future__ import annotations

import pytest

from tests.helpers.stored_jobs import printed
from tlora_megatron.cli.main import main
from tlora_megatron.service.store import NewJob, Store


def test_a_token_is_shown_once_and_can_be_taken_back(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "create", "ann", "--gpus", "2", "--requests-per-s", "9.5"]) == 0
    secret = capsys.readouterr().out.strip()
    assert secret.startswith("tml-tlora-")
    assert len(secret) == len("tml-tlora-") + 43
    found = store.tokens.find(secret)
    assert found is not None
    assert (found.tenant, found.scopes) == ("ann", ("submit", "read"))
    assert (store.tenants.limits("ann").gpus, store.tenants.limits("ann").jobs) == (2, 1000)
    assert main(["token", "list", "--json"]) == 0
    (row,) = printed(capsys)
    assert row["id"] == found.id
    assert secret not in str(row)
    assert main(["token", "list"]) == 0
    assert found.id in capsys.readouterr().out
    assert main(["token", "revoke", found.id]) == 0
    assert store.tokens.find(secret) is None


def test_limits_are_changed_one_by_one(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "limit", "bob", "--jobs", "7"]) == 0
    assert "bob: gpus all, jobs 7, upload_bytes 10000000000" in capsys.readouterr().out
    assert main(["token", "limit", "bob", "--upload-bytes", "5", "--json"]) == 0
    assert printed(capsys) == {"gpus": None, "jobs": 7, "upload_bytes": 5, "requests_per_s": 50.0}


def test_whoever_serves_finds_a_tenant_s_job_by_its_id_alone(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    new = NewJob(name="theirs", document={}, base="b", key="k")
    job = store.jobs.submit([new], tenant="ann")[0].id
    assert main(["cancel", "theirs"]) == 2
    assert main(["cancel", job]) == 0
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
    store: Store, capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    assert main(["token", *argv]) == 2
    assert sentence in capsys.readouterr().err
    assert store.tokens.all() == []
