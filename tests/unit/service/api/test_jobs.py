"""`/v1/jobs`: submits, pages, actions; tokens."""

from __future__ import annotations

import os
from typing import Any

import pytest
import yaml

from tests.helpers.http_service import BASE, Api, bearer, job, posted, put_file
from tests.helpers.stored_jobs import put_job
from tlora_megatron.service.api import gate
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.store import JobState, TenantLimits


def test_a_job_is_submitted_in_json_and_yaml(api: Api) -> None:
    put_file(api)
    client = api.client()
    answer = client.post("/v1/jobs", json=job("a", service={"gpus": 1, "priority": 3}))
    assert answer.status_code == 201, answer.text
    (row,) = answer.json()["jobs"]
    assert (row["name"], row["state"], row["tenant"]) == ("a", "validating", "ann")
    answer = client.post("/v1/jobs", content=yaml.safe_dump(job("b")))
    assert answer.status_code == 201, answer.text
    document = api.store.jobs.document(row["id"])
    assert document["document"]["data"]["train"] == str(api.home.tenant("ann") / "rows.jsonl")
    assert document["tenant"] == "ann"
    assert api.store.jobs.get(row["id"]).schedule["priority"] == 3


def test_a_file_of_tlora_train_is_submitted_as_a_whole_or_not(api: Api) -> None:
    put_file(api)
    entries = [{key: value for key, value in job(n).items() if key != "base_model"} for n in "ab"]
    document = {"base_model": {"path": BASE}, "run": {}, "jobs": entries}
    answer = api.client().post("/v1/jobs", json=document)
    assert [row["name"] for row in answer.json()["jobs"]] == ["a", "b"]
    assert "section run has no effect" in answer.json()["warnings"][0]
    refused = api.client().post("/v1/jobs", json=job("a"))
    assert refused.status_code == 409
    assert "a job's name must be unique" in refused.json()["error"]["message"]


def test_a_key_makes_its_jobs_once(api: Api) -> None:
    put_file(api)
    client = api.client()
    headers = {"Idempotency-Key": "night"}
    first = client.post("/v1/jobs", json=job(), headers=headers)
    again = client.post("/v1/jobs", json=job(), headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["jobs"][0]["id"] == again.json()["jobs"][0]["id"]
    for other in (job(max_steps=3), {**job("b"), "name": "b"}):
        assert client.post("/v1/jobs", json=other, headers=headers).status_code == 409
    put_file(api, "bob")
    assert api.client("bob").post("/v1/jobs", json=job(), headers=headers).status_code == 201
    assert client.post("/v1/jobs", json=job(), headers={"Idempotency-Key": " "}).status_code == 400


def test_pages_follow_each_other_and_hold_the_own_jobs_alone(api: Api) -> None:
    for tenant in ("ann", "bob"):
        put_file(api, tenant)
        for name in "abcde":
            api.client(tenant).post("/v1/jobs", json=job(name))
    client = api.client()
    names, after = [], None
    while True:
        page = client.get("/v1/jobs", params={"limit": 2, **({"after": after} if after else {})})
        names += [row["name"] for row in page.json()["jobs"]]
        after = page.json()["next"]
        if after is None:
            break
    assert names == list("abcde")
    newest = client.get(
        "/v1/jobs", params={"newest_first": True, "limit": 1, "counts": True}
    ).json()
    assert [row["name"] for row in newest["jobs"]] == ["e"]
    assert newest["counts"] == {"validating": 5}
    assert not newest["served"]
    assert client.get("/v1/jobs", params={"state": ["queued", "running"]}).json()["jobs"] == []
    assert len(client.get("/v1/jobs", params={"state": "validating"}).json()["jobs"]) == 5
    assert client.get("/v1/jobs", params={"name": "c"}).json()["jobs"][0]["name"] == "c"
    assert client.get("/v1/jobs", params={"state": "sleeping"}).status_code == 400
    theirs = api.client("bob").get("/v1/jobs").json()["jobs"][0]["id"]
    assert client.get("/v1/jobs", params={"after": theirs}).status_code == 404
    assert client.get("/v1/jobs", params={"tenant": "bob"}).status_code == 403
    admin = api.client("root", ("admin",))
    assert len(admin.get("/v1/jobs", params={"tenant": "*"}).json()["jobs"]) == 10
    assert admin.get(f"/v1/jobs/{theirs}").json()["tenant"] == "bob"


def test_actions_are_written_for_the_controller(api: Api) -> None:
    put_file(api)
    client = api.client()
    client.post("/v1/jobs", json=job())
    assert client.post("/v1/jobs/a/pause").json()["wish"] == "pause"
    assert client.post("/v1/jobs/a/resume").json()["wish"] == "resume"
    assert client.delete("/v1/jobs/a").json()["wish"] == "cancel"
    assert client.delete("/v1/jobs/a").status_code == 200, "asked once more"
    assert client.post("/v1/jobs/a/pause").status_code == 409
    assert api.client("ann", ("read",)).delete("/v1/jobs/a").status_code == 403
    job_id = client.get("/v1/jobs/a").json()["id"]
    api.store.jobs.change(job_id, JobState.CANCELLED)
    assert client.delete("/v1/jobs/a").status_code == 409
    assert api.client("bob").delete(f"/v1/jobs/{job_id}").status_code == 404


def test_many_jobs_are_asked_and_those_that_have_ended_removed(api: Api) -> None:
    put_file(api)
    mine, ended, gone = (put_job(api.store, name) for name in ("a", "b", "c"))
    theirs = put_job(api.store, "d", "bob")
    for job_id in (ended, gone, theirs):
        make_folder(api.home.job(job_id)).joinpath("x").write_text("xx")
        api.store.jobs.change(job_id, JobState.CANCELLED)
    client, body = api.client(), {"action": "cancel", "jobs": [mine, theirs, ended]}
    answer = client.post("/v1/jobs/act", json=body).json()
    assert [(row["id"], row["wish"]) for row in answer["jobs"]] == [(mine, "cancel")]
    assert list(answer["refused"]) == [ended, theirs]
    assert answer["refused"][theirs] == f"job must be one of yours, got {theirs!r}"
    listed = client.get("/v1/jobs", params={"disk": True}).json()["jobs"]
    assert [row["disk"] for row in listed] == [{}, {"x": 2}, {"x": 2}]
    assert client.delete(f"/v1/jobs/{mine}?purge=true").status_code == 409
    assert client.delete(f"/v1/jobs/{gone}?purge=true").json()["id"] == gone
    body = {"action": "remove", "jobs": [theirs, ended]}
    assert api.client("ann", ("read",)).post("/v1/jobs/act", json=body).status_code == 403
    assert list(client.post("/v1/jobs/act", json=body).json()["refused"]) == [theirs]
    assert os.listdir(api.home.jobs) == [theirs]
    admin = api.client("root", ("admin", "submit"))
    for job_id in (gone, ended):
        assert client.get(f"/v1/jobs/{job_id}").status_code == 404
        assert admin.get(f"/v1/jobs/{job_id}").status_code == 404
    refused = client.post("/v1/jobs", json=job("e", init_from=f"jobs/{gone}/adapter"))
    assert "must be in the folder of one of your jobs" in refused.text


def test_a_tenant_with_a_full_disk_submits_nothing_until_it_removes_something(api: Api) -> None:
    put_file(api)
    api.store.tenants.set_limits("ann", TenantLimits(disk_bytes=100))
    old = put_job(api.store, "old")
    api.store.jobs.change(old, JobState.CANCELLED)
    make_folder(api.home.job(old) / "adapter").joinpath("x").write_bytes(b"x" * 100)
    client = api.client()
    refused = client.post("/v1/jobs", json=job("new"))
    assert refused.status_code == 429
    assert "must have less than 100 bytes on the disk, got 100: remove jobs" in refused.text
    file = {"file": ("a.jsonl", b'{"prompt": "a", "completion": "b"}')}
    sent = client.post("/v1/files", data={"purpose": "fine-tune"}, files=file)
    assert sent.status_code == 429
    assert client.delete(f"/v1/jobs/{old}?purge=true").status_code == 200
    assert client.post("/v1/jobs", json=job("new")).status_code == 201


def test_limits_of_a_tenant(api: Api) -> None:
    put_file(api)
    api.store.tenants.set_limits("ann", TenantLimits(jobs=2, gpus=2))
    client = api.client()
    headers = {"Idempotency-Key": "k"}
    first = client.post("/v1/jobs", json=job("a"), headers=headers).json()["jobs"][0]["id"]
    client.post("/v1/jobs", json=job("b"))
    refused = client.post("/v1/jobs", json=job("c"))
    assert refused.status_code == 429
    assert "must have at most 2 unfinished jobs, got 2 and 1 more" in refused.text
    assert client.post("/v1/jobs", json=job("a"), headers=headers).status_code == 200
    refused = client.post("/v1/jobs", json=job("d", service={"gpus": 3}))
    assert "service.gpus of job 'd' must be at most your limit, 2, got 3" in refused.text
    put_file(api, "bob")
    assert api.client("bob").post("/v1/jobs", json=job("c")).status_code == 201
    api.store.jobs.change(first, JobState.CANCELLED)
    assert client.post("/v1/jobs", json=job("c")).status_code == 201


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"base_model": "/etc"}, "base_model must name a base of the service (quickstart), got"),
        ({"base_model": {"path": BASE, "dtype": "float32"}}, "must name a base of the service"),
        ({"lora": {"rank": 0}}, "jobs[0].lora.rank must be at least 1, got 0"),
        ({"max_stepz": 1}, "jobs[0].max_stepz is not a known key; did you mean max_steps?"),
        ({"data": {"train": "nowhere.jsonl"}}, "jobs[0].data.train must be there, in your folder"),
        ({"data": {"train": ["no.jsonl"]}}, "jobs[0].data.train must be there, in your folder"),
        ({"data": {"train": 3}}, "jobs[0].data.train must be"),
        ({"data": {"chat_template": "../x/qwen3"}}, "chat_template must be one of gpt_oss, qwen3"),
        ({"name": "j1abcd"}, "a job's name must not look like a job's id"),
    ],
)
def test_mistakes_are_told_where_they_stand(
    still: Api, fields: dict[str, Any], sentence: str
) -> None:
    answer = still.client().post("/v1/jobs", json=job(**fields))
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]["message"]
    assert str(still.home.root) not in answer.text
    assert still.store.jobs.page() == []


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
def test_without_a_token_of_the_service_nothing_is_told(
    still: Api, headers: dict[str, str]
) -> None:
    encoded = {name: value.encode("latin1") for name, value in headers.items()}
    answer = still.client(None).get("/v1/jobs", headers=encoded)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "tlora token create" in answer.json()["error"]["message"]
    assert answer.headers["www-authenticate"] == "Bearer"


def test_both_headers_let_in_and_another_tenant_s_job_is_as_one_that_never_was(api: Api) -> None:
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
    api.store.tenants.set_limits("eve", TenantLimits(requests_per_s=0.0))
    assert api.client("eve").get("/v1/jobs").status_code == 429, "not even a first one"


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


def test_a_tenant_holds_so_many_streams_and_uploads_and_no_more(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, made = api.client(), posted(api)
    monkeypatch.setattr("tlora_megatron.service.api.native.history.MOST_STREAMS", 0)
    monkeypatch.setattr("tlora_megatron.service.api.openai.uploads.AT_ONCE", 0)
    assert client.get(f"/v1/jobs/{made}/events?follow=false").status_code == 200
    assert client.get(f"/v1/jobs/{made}/events").status_code == 429
    form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "fine-tune"}}
    assert client.post("/v1/files", **form).status_code == 429  # type: ignore[arg-type]


def test_numbers_that_no_database_holds_are_refused(api: Api) -> None:
    client, made = api.client(), posted(api)
    huge = 10**30
    for path in (f"jobs/{made}/events?follow=false&after={huge}.0.0", f"decisions?before={huge}"):
        assert client.get(f"/v1/{path}").status_code == 400
