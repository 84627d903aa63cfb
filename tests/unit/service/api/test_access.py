"""Tokens at the API: who is let in, for what, and how often."""

from __future__ import annotations

import httpx
import pytest

from tests.helpers.http_service import Api, bearer, listening
from tests.helpers.stored_jobs import put_job
from tests.unit.service.api.test_jobs import job, put_file
from tlora_megatron.service.api import gate
from tlora_megatron.service.store import TenantLimits


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer tml-tlora-" + "a" * 43},
        {"Authorization": "Basic abc"},
        {"Authorization": "Bearer " + "\udce4".encode("utf-8", "surrogateescape").decode("latin1")},
        {"X-API-Key": "tml-"},
    ],
    ids=["none", "unknown", "basic", "no text", "short"],
)
def test_without_a_token_of_the_service_nothing_is_told(api: Api, headers: dict[str, str]) -> None:
    job = put_job(api.store)
    encoded = {name: value.encode("latin1") for name, value in headers.items()}
    answer = api.client(None).get(f"/v1/jobs/{job}", headers=encoded)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "tlora token create" in answer.json()["error"]["message"]
    assert answer.headers["www-authenticate"] == "Bearer"


def test_both_headers_let_in_and_a_neighbour_s_job_is_as_one_that_never_was(api: Api) -> None:
    job = put_job(api.store)
    client = api.client(None)
    for headers in (bearer(api.token("ann")), {"X-API-Key": api.token("ann")}):
        assert client.get(f"/v1/jobs/{job}", headers=headers).json()["id"] == job
    for text in (job, "a"):
        refused = api.client("bob").get(f"/v1/jobs/{text}")
        never = api.client("bob").get("/v1/jobs/j99zzzz")
        assert refused.status_code == never.status_code == 404
        assert refused.text.replace(f"'{text}'", "'j99zzzz'") == never.text


def test_scopes_and_revoked_tokens(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "KNOWN_S", 0.0)
    job = put_job(api.store)
    client = api.client("ann", ("submit",))
    answer = client.get(f"/v1/jobs/{job}")
    assert answer.status_code == 403
    assert "must have the scope read for this, got submit" in answer.json()["error"]["message"]
    made = api.store.tokens.make("ann", ["admin"])
    assert client.get(f"/v1/jobs/{job}", headers=bearer(made.secret)).status_code == 200
    api.store.tokens.revoke(made.token.id)
    assert client.get(f"/v1/jobs/{job}", headers=bearer(made.secret)).status_code == 401


def test_a_tenant_that_asks_too_often_waits_and_the_others_do_not(api: Api) -> None:
    api.store.tenants.set_limits("ann", TenantLimits(requests_per_s=0.5))
    ann, bob = api.client("ann"), api.client("bob")
    answers = [ann.get("/v1/jobs/a") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [404, 404, 429]
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert int(answers[-1].headers["retry-after"]) in (1, 2)
    assert bob.get("/v1/jobs/a").status_code == 404


def test_errors_are_sentences(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    client = api.client("ann")
    assert "/docs lists them" in client.get("/nowhere").json()["error"]["message"]
    assert client.post("/v1/jobs/a").status_code == 405

    def broken(*_: object, **__: object) -> None:
        raise KeyError("secret of the house")

    monkeypatch.setattr(api.store.jobs, "find", broken)
    answer = client.get("/v1/jobs/a")
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_over_a_port(api: Api) -> None:
    job = put_job(api.store)
    with listening(api.app) as address:
        answer = httpx.get(f"{address}/v1/jobs/{job}", headers=bearer(api.token("ann")))
        assert answer.json()["name"] == "a"
        assert "server" not in answer.headers


def test_a_tenant_without_requests_has_not_even_a_first_one(api: Api) -> None:
    api.store.tenants.set_limits("ann", TenantLimits(requests_per_s=0.0))
    assert api.client().get("/v1/jobs").status_code == 429


def test_a_tenant_holds_so_many_streams_and_uploads_and_no_more(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client()
    put_file(api)
    made = client.post("/v1/jobs", json=job()).json()["jobs"][0]["id"]
    monkeypatch.setattr("tlora_megatron.service.api.native.history.MOST_STREAMS", 0)
    monkeypatch.setattr("tlora_megatron.service.api.openai.files.AT_ONCE", 0)
    assert client.get(f"/v1/jobs/{made}/events?follow=false").status_code == 200
    assert client.get(f"/v1/jobs/{made}/events").status_code == 429
    form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "fine-tune"}}
    assert client.post("/v1/files", **form).status_code == 429  # type: ignore[arg-type]


def test_numbers_that_no_database_holds_are_refused(api: Api) -> None:
    client = api.client()
    put_file(api)
    made = client.post("/v1/jobs", json=job()).json()["jobs"][0]["id"]
    huge = 10**30
    for path in (f"jobs/{made}/events?follow=false&after={huge}.0.0", f"decisions?before={huge}"):
        assert client.get(f"/v1/{path}").status_code == 400
