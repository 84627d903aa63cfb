"""Attacks of strangers and other tenants, each refused with a sentence; docs/http.md has a table.

Protobuf and its compression are in the tests of the tinker client's API.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.helpers.http_service import Api, bearer, job, listening, posted, put_file
from tests.helpers.launch import HANG_S
from tlora_megatron.service.api import probes, server
from tlora_megatron.service.front import Place
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.prepare.submission import PrepareRules, Refused, Submission
from tlora_megatron.service.prepare.worker import validate
from tlora_megatron.service.store import NewUpload, StoreError, StoreFull, StoreUnreachable

PUBLIC = {"/", "/docs", "/openapi.json", "/api/v1/healthz", *probes.PATHS}
"""Paths that tell nothing of any tenant."""
FILE = "file-0123456789abcdef01234567"


def _routes(api: Api) -> list[tuple[str, str]]:
    paths = api.app.openapi()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


def _filled(path: str, **names: str) -> str:
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: names.get(match[1], "1"), path)


def _sentence(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def test_without_a_token_no_route_does_anything(api: Api) -> None:
    client = api.client(None)
    routes = [route for route in _routes(api) if route[1] not in PUBLIC]
    assert len(routes) > 30
    for method, path in routes:
        answer = client.request(method, _filled(path))
        assert answer.status_code == 401, (method, path, answer.text)
        assert "token" in answer.text


def test_another_tenant_s_ids_lead_nowhere_and_lists_hold_the_own_alone(api: Api) -> None:
    made = posted(api, name="secret")
    row = {"id": FILE, "name": "secret.jsonl", "purpose": "fine-tune", "digest": "", "size": 1}
    api.store.uploads.add(NewUpload(**row, facts={}), tenant="ann")
    bob = api.client("bob")
    names = {"job": made, "file": FILE, "model_id": made}
    for method, path in _routes(api):
        if path == "/v1/stream":  # it does not end; test_views.py reads it
            continue
        answer = bob.request(method, _filled(path, **names), json={})
        told = ["secret"]
        if names.keys() & set(re.findall(r"\{(\w+)", path)):
            assert answer.status_code in (400, 403, 404), (method, path, answer.text)
        else:
            told += [made, FILE]
        assert not any(word in answer.text for word in told), (method, path, answer.text)
    found = api.store.jobs.get(made)
    assert (found.wish, found.state) == (None, "validating")


PATHS = [
    "../bob/rows.jsonl",
    "a/../../bob/rows.jsonl",
    "./../bob/rows.jsonl",
    "..%2fbob%2frows.jsonl",
    "%2e%2e/bob/rows.jsonl",
    "..\\bob\\rows.jsonl",
    "....//bob/rows.jsonl",
    "\uff0e\uff0e/bob/rows.jsonl",
    "/etc/passwd",
    "//etc/passwd",
    "~/rows.jsonl",
    "~root/rows.jsonl",
    "rows.jsonl\0.txt",
    "rows.jsonl\n",
    ".",
    "",
    "a" * 5000,
    FILE,
    "file-../../bob/rows.jsonl",
    "$HOME/rows.jsonl",
    "http://169.254.169.254/latest/meta-data",
    "https://localhost:8017/v1/jobs",
    "file:///etc/passwd",
    "FILE:/etc/passwd",
    "s3://bucket/rows.jsonl",
    "gopher://127.0.0.1:6379/_",
    "hf://datasets/a/b",
    "link.jsonl",
    "linked/rows.jsonl",
    "pipe",
    "folder",
]


@pytest.fixture(scope="module")
def tenants(still: Api) -> Api:
    """Files of two tenants, with links and a pipe that an operator forgot."""
    put_file(still, "bob")
    folder = still.home.tenant("ann")
    (folder / "link.jsonl").symlink_to(still.home.tenant("bob") / "rows.jsonl")
    (folder / "linked").symlink_to(still.home.tenant("bob"))
    make_folder(folder / "folder")
    os.mkfifo(folder / "pipe")
    return still


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_no_spelling_of_a_path_leaves_the_tenant_s_folder(tenants: Api, path: str) -> None:
    client = tenants.client()
    fields: list[dict[str, Any]] = [
        {"data": {"train": path}},
        {"data": {"train": "rows.jsonl", "eval": path}},
    ]
    if path != "folder":
        fields += [{"init_from": path}, {"resume_from": path}, {"base_model": path}]
    for field in fields:
        answer = client.post("/v1/jobs", json=job(**field))
        assert answer.status_code == 400, (field, answer.text)
        assert " must " in _sentence(answer)
        assert "root:" not in answer.text
        assert str(tenants.home.root) not in answer.text
    assert tenants.store.jobs.page(tenant="ann") == []


@pytest.mark.parametrize(
    "path", ["jobs/{job}", "jobs/{job}/adapter", "jobs/{job}/../{job}", "jobs/x", "jobs/{job}//a"]
)
def test_another_tenant_s_job_is_no_start(tenants: Api, path: str) -> None:
    headers = {"Idempotency-Key": "theirs"}
    bob = tenants.client("bob")
    theirs = bob.post("/v1/jobs", json=job(), headers=headers).json()["jobs"][0]["id"]
    make_folder(tenants.home.job(theirs) / "adapter")
    for key in ("init_from", "resume_from"):
        answer = tenants.client().post("/v1/jobs", json=job(**{key: path.format(job=theirs)}))
        assert answer.status_code == 400
    own = job("own", init_from=f"jobs/{theirs}/adapter")
    answer = bob.post("/v1/jobs", json=own, headers={"Idempotency-Key": "own"})
    assert answer.status_code in (200, 201), answer.text


def test_a_link_that_comes_after_the_check_is_not_followed_either(api: Api) -> None:
    put_file(api, "bob")
    made = posted(api)
    document = api.store.jobs.document(made)
    fields = {key: document[key] for key in ("name", "base_model", "document", "tenant")}
    path = api.home.tenant("ann") / "rows.jsonl"
    path.unlink()
    path.symlink_to(api.home.tenant("bob") / "rows.jsonl")
    rules = PrepareRules(root=str(api.home.root), data_root=None)
    outcome = validate(made, Submission(**fields), rules)
    assert isinstance(outcome, Refused)
    assert "links are not followed" in outcome.error


IDS = ["..%2f..%2fetc", "%2e%2e", "a%00b", "%ff", "' OR 1=1 --", "*", "j1abcd%0d%0aX: y", "\u202e"]
IDS += ["file-x", "file-results-j1aaaa"]


@pytest.mark.parametrize("text", IDS, ids=range(len(IDS)))
def test_ids_are_only_looked_up(still: Api, text: str) -> None:
    files = ("files/{}", "files/{}/content", "models/{}")
    for path in ("jobs/{}", "jobs/{}/events", "jobs/{}/adapter.zip", *files):
        answer = still.client().get(f"/v1/{path.format(text)}")
        assert answer.status_code in (400, 404), answer.text
        assert _sentence(answer)


def _zipped() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("job.yaml", b"0" * 10_000_000)
    return target.getvalue()


_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n" for before, name in pairwise("abcdefghi")
)
BODIES = {
    "pickle": (pickle.dumps({"name": "a"}), "application/octet-stream"),
    "zip bomb": (_zipped(), "application/zip"),
    "gzip bomb": (gzip.compress(b"0" * 10_000_000), "application/json"),
    "laughs": (_LAUGHS.encode(), "application/yaml"),
    "merges": (b"a: &a {x: 1}\nb: {<<: *a}", "application/yaml"),
    "deep YAML": (b"a: " + b"[" * 5000 + b"]" * 5000, "application/yaml"),
    "deep JSON": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "application/json"),
    "shallow enough for a parser": (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", "application/json"),
    "Python's tags": (b"a: !!python/object/apply:os.system [id]", "application/yaml"),
    "long YAML": (b"a: " + b"x" * 300_000, "application/yaml"),
    "long JSON": (b'{"a": "' + b"x" * 5_000_000 + b'"}', "application/json"),
    "digits": (b'{"name": ' + b"9" * 5000 + b"}", "application/json"),
    "half a character": (b'{"base_model": "quickstart", "name": "\\ud800"}', "application/json"),
    "NaN": (json.dumps(job(lora={"alpha": float("nan")})).encode(), "application/json"),
    "twice": (b'{"name": "a", "name": "b"}', "application/json"),
    "a list": (b"[]", "application/json"),
    "nothing": (b"", "application/yaml"),
    "cut off": (b"jobs: [a, b\nrun: {", "application/yaml"),
    "no text": (b"\xff\xfe\x00", "application/yaml"),
}


@pytest.mark.parametrize("name", BODIES)
def test_evil_bodies(still: Api, name: str) -> None:
    content, content_type = BODIES[name]
    headers = {"Content-Type": content_type}
    if name.startswith("gzip"):
        headers["Content-Encoding"] = "gzip"
    answer = still.client().post("/v1/jobs", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert " must " in _sentence(answer), answer.text
    assert "\n" not in _sentence(answer), answer.text
    assert len(answer.text) < 2000
    assert still.store.jobs.page(tenant="ann") == []


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/v1/chat/completions"])
def test_two_gigabytes_are_refused_before_they_come(still: Api, path: str) -> None:
    answer = still.client().post(path, content=b"{", headers={"Content-Length": str(2 << 30)})
    assert answer.status_code == 413
    assert "the body must have at most" in _sentence(answer)


def test_a_body_that_does_not_say_its_length_is_cut(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 1000)

    async def send() -> httpx.Response:
        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 100

        async with api.async_client() as client:
            return await client.post("/v1/jobs", content=endless())

    answer = asyncio.run(send())
    assert answer.status_code == 413
    assert _sentence(answer) == "the body must have at most 1,000 bytes, got more"


@pytest.mark.parametrize("path", ["/v1/fine_tuning/jobs", "/v1/completions", "/api/v1/asample"])
def test_a_body_without_a_key_is_given_up_at_once(still: Api, path: str) -> None:
    parts = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal parts
        while parts < 50:
            parts += 1
            yield b" " * 1000

    async def send() -> httpx.Response:
        async with still.async_client() as client:
            client.headers["Authorization"] = "Bearer tml-tlora-of-nobody"
            return await client.post(path, content=body(), headers={"Content-Type": "text/json"})

    answer = asyncio.run(send())
    assert (answer.status_code, parts) == (401, 1)
    assert "token" in _sentence(answer)


async def _talk(port: int, *parts: bytes) -> bytes:
    """Sends parts and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), HANG_S)
    writer.close()
    return answer


def test_clients_that_are_slow_or_talk_too_much_are_hung_up_on(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PAUSE_S", 0.2)
    monkeypatch.setattr(server, "HEADERS_S", 0.2)
    token = api.token("ann").encode()
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + token + b"\r\n"
    with listening(api.app) as address:
        port = int(address.rpartition(":")[2])
        assert asyncio.run(_talk(port)) == b"", "it never says a word"
        assert asyncio.run(_talk(port, b"GET / HT")) == b"", "it never ends its headers"
        answer = asyncio.run(_talk(port, head + b"Content-Length: 100\r\n\r\nname: "))
        assert b" 408 " in answer
        assert b"the body must come faster" in answer
        answer = asyncio.run(_talk(port, head + b"X: " + b"x" * 100_000))
        assert b" 400 " in answer
        assert b"at most 32,768 bytes of headers" in answer
        answer = asyncio.run(
            _talk(port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS\r\n\r\n")
        )
        assert b"a request must be HTTP/1.1" in answer


@pytest.mark.parametrize(
    "more",
    [
        b"X: 1\nY: 2\r\n",
        b"X: 1\r\n Y: 2\r\n",
        b"Authorization: Bearer a\r\nauthorization: Bearer b\r\n",
        b"X: 1\r\n" * 101,
        b"X: " + b"x" * 40_000 + b"\r\n",
    ],
    ids=["bare line feed", "folded", "two tokens", "many", "long"],
)
def test_heads_that_programs_may_read_differently_are_refused(still: Api, more: bytes) -> None:
    whole = b"GET /api/v1/healthz HTTP/1.1\r\nHost: a\r\n%b\r\n"
    with listening(still.app) as address:
        port = int(address.rpartition(":")[2])
        good, bad = whole % b"X: 1\r\n", whole % more
        for parts in ((bad,), (good, bad), (good + bad,)):
            answer = asyncio.run(_talk(port, *parts))
            assert answer.count(b"HTTP/1.1 200") == len(b"".join(parts)) // len(good + bad)
            assert b" 400 " in answer
            assert b"a request must be HTTP/1.1 with at most 32,768 bytes" in answer


def test_pages_of_other_sites_reach_nothing(api: Api) -> None:
    app = server.make_app(api.service, Place("127.0.0.1", 1).names(["Tlora.example"]))
    client = TestClient(app, headers=bearer(api.token("ann")))
    for host in ("localhost:8017", "127.0.0.1", "[::1]:8017", "tlora.example"):
        assert client.get("/v1/jobs", headers={"Host": host}).status_code == 200
    answer = client.get("/v1/jobs", headers={"Host": "evil.example:8017"})
    assert answer.status_code == 403
    assert "got 'evil.example': the service allows another name" in _sentence(answer)
    for origin in ("http://evil.example", "null", "http://localhost:3000"):
        headers = {"Host": "localhost:8017", "Origin": origin}
        assert client.get("/v1/jobs", headers=headers).status_code == 200
        answer = client.post("/v1/jobs", headers=headers, json={})
        assert answer.status_code == 403
        assert "Origin must be that of this service" in _sentence(answer)
    headers = {"Host": "localhost:8017", "Origin": "http://localhost:8017"}
    assert client.post("/v1/jobs", headers=headers, json={}).status_code == 400
    assert Place("0.0.0.0", 1).names([]) is None


def test_a_client_that_goes_away_leaves_no_trace_in_the_log(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    head = (
        b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\nAuthorization: Bearer %b\r\n\r\n{"
    )
    token = api.token("ann").encode()

    async def begin(port: int, path: bytes) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % (path, token))
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()

    with listening(api.app) as address:
        port = int(address.rpartition(":")[2])
        for path in (b"/v1/jobs", b"/api/v1/forward_backward", b"/v1/completions"):
            asyncio.run(begin(port, path))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [(OSError(errno.ENOSPC, "no"), 507), (StoreFull("no"), 507), (StoreUnreachable("no"), 503)],
)
def test_a_disk_or_store_that_refuses_costs_a_sentence_and_no_trace(
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    client = TestClient(api.app, headers=bearer(api.token()))
    monkeypatch.setattr(type(api.store.jobs), "page", refuse)
    answers = [client.get("/v1/jobs")]
    if isinstance(error, StoreError):  # also when a body comes, whose sender is looked up
        api.service.gate._known.clear()
        monkeypatch.setattr(type(api.store.tokens), "find", refuse)
        answers.append(client.post("/v1/completions", content=b"{"))
    for answer, record in zip(answers, caplog.records, strict=True):
        assert (answer.status_code, answer.headers["Retry-After"]) == (status, "5")
        assert not record.exc_info
        assert record.getMessage().startswith("a request is refused: ")


def test_a_body_that_drips_is_given_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PATIENCE_S", -1.0)
    answer = api.client().post("/v1/jobs", content=b"name: a")
    assert answer.status_code == 408


def test_the_page_for_people_is_whole_and_loads_nothing_from_elsewhere(api: Api) -> None:
    answer = api.client(None).get("/docs")
    assert answer.status_code == 200
    assert not re.search(r"(src|href)=\"(https?:)?//", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    described = api.client(None).get("/openapi.json").json()
    assert described["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/yaml"]
    assert described["tags"][0]["name"] == "jobs"
