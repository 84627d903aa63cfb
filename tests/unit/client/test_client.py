"""The client: what it sends, when it sends again, and what it makes of answers."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.launch import imported
from tlora_megatron.client import AsyncClient, Client, JobState, ServiceError, Unreachable
from tlora_megatron.service import store

Answers = list[httpx.Response | Exception]
ADDRESS = "http://127.0.0.1:1"
ROW = {
    "id": "j1aaaa", "name": "a", "tenant": "ann", "state": "running", "wish": None, "step": 1,
    "num_steps": 2, "tokens": 3, "loss": 0.5, "error": None, "gang": "g1", "gang_epoch": 1,
    "submitted_at": 1.0, "started_at": 2.0, "ended_at": None, "something_new": 1,
}  # fmt: skip
OVER = {**ROW, "state": "finished"}


def event(place: str, **row: Any) -> bytes:
    return f"id: {place}\ndata: {json.dumps(row)}\n\n".encode()


class Cut(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body whose connection breaks."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        yield self._content
        raise httpx.ReadError("cut")

    async def __aiter__(self) -> Any:
        for part in self:
            yield part


class Served:
    """Plays a service: gives one answer after another, and keeps the requests."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.requests: list[httpx.Request] = []
        self.waits: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def paths(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]


def ok(body: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=body)


def stream(content: bytes | Cut) -> httpx.Response:
    if isinstance(content, Cut):
        return httpx.Response(200, stream=content)
    return httpx.Response(200, content=content)


def refused(status: int, message: str, **headers: str) -> httpx.Response:
    body = {"error": {"message": message, "type": "x", "param": "p", "code": None}}
    return httpx.Response(status, json=body, headers=headers)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Served, Client]]:
    def make(*answers: httpx.Response | Exception, retries: int = 5) -> tuple[Served, Client]:
        served = Served(list(answers))
        monkeypatch.setattr("time.sleep", served.waits.append)
        transport = httpx.MockTransport(served)
        return served, Client(ADDRESS, "secret", retries=retries, transport=transport)

    return make


Play = Callable[..., tuple[Served, Client]]


def test_a_submit_has_a_key_that_its_retries_share(play: Play) -> None:
    answer = ok({"jobs": [ROW], "warnings": ["w"], "served": False}, 201)
    served, client = play(httpx.ConnectError("no"), httpx.ReadTimeout("late"), answer)
    made = client.submit({"name": "a"})
    keys = {request.headers["idempotency-key"] for request in served.requests}
    assert len(served.requests) == 3
    assert len(keys) == 1
    assert keys != {""}
    assert served.requests[0].headers["authorization"] == "Bearer secret"
    assert (made.jobs[0].id, made.is_new) == ("j1aaaa", True)
    assert (made.warnings, made.served) == (("w",), False)
    assert made.jobs[0].state is JobState.RUNNING


def test_a_text_goes_as_yaml_under_the_caller_s_key(play: Play) -> None:
    served, client = play(ok({"jobs": [ROW]}, 200))
    assert not client.submit("name: a", key="mine").is_new
    (request,) = served.requests
    assert request.headers["content-type"] == "application/yaml"
    assert (request.headers["idempotency-key"], request.content) == ("mine", b"name: a")


def test_a_busy_service_is_asked_again_when_it_says(play: Play) -> None:
    busy = refused(503, "busy", **{"Retry-After": "7"})
    served, client = play(busy, refused(429, "often"), ok(ROW))
    assert client.job("a").tokens == 3
    assert served.waits[0] == 7
    assert 0 < served.waits[1] <= 0.5


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 500])
def test_a_refusal_is_final(play: Play, status: int) -> None:
    served, client = play(refused(status, "job must be one of yours, got 'a'"))
    with pytest.raises(ServiceError, match="job must be one of yours") as caught:
        client.job("a")
    assert (caught.value.status, caught.value.param) == (status, "p")
    assert len(served.requests) == 1


def test_it_gives_up(play: Play) -> None:
    _, client = play(*[httpx.ConnectError("refused")] * 3, retries=2)
    with pytest.raises(Unreachable, match=rf"must answer at {ADDRESS}, got refused"):
        client.cancel("a")
    _, client = play(httpx.Response(502, text="<html>"), retries=0)
    with pytest.raises(ServiceError, match="must answer, got status 502"):
        client.pause("a")


def test_what_it_asks_for(play: Play) -> None:
    served, client = play(*[ok(ROW)] * 3, ok({}), ok({"a": 1}), ok({}), ok({"rows": [{}]}))
    client.cancel("a/b"), client.pause("a"), client.resume("a")
    client.cluster(), client.groups(), client.decisions(3)
    assert client.metrics("a") == [{}]
    assert served.paths == [
        "DELETE /v1/jobs/a/b",
        "POST /v1/jobs/a/pause",
        "POST /v1/jobs/a/resume",
        "GET /v1/cluster",
        "GET /v1/groups",
        "GET /v1/decisions",
        "GET /v1/jobs/a/metrics",
    ]
    assert served.requests[0].url.raw_path == b"/v1/jobs/a%2Fb"
    for name in ("", ".", ".."):
        with pytest.raises(ValueError, match="a job must be named by its id or name"):
            client.job(name)


def test_lists_are_read_to_their_end(play: Play) -> None:
    first = ok({"jobs": [ROW], "next": "j1aaaa", "counts": {"running": 2}, "served": True})
    served, client = play(first, ok({"jobs": [ROW], "next": None}))
    assert len(list(client.jobs(["running", "queued"]))) == 2
    assert served.requests[0].url.params.get_list("state") == ["running", "queued"]
    assert served.requests[1].url.params["after"] == "j1aaaa"


def test_a_stream_goes_on_where_it_was_cut(play: Play) -> None:
    begin, rest = event("1.0.-1", a=1) + event("1.1.-1", a=2), event("2.1.-1", a=3)
    half = b"id: 2.1.-1\ndata: {"
    served, client = play(
        ok(ROW),
        stream(Cut(b": alive\n\n" + begin + half)),
        httpx.ConnectError("away"),
        refused(503, "starting"),
        stream(rest),
        ok(OVER),
    )
    assert [one.row["a"] for one in client.events("a")] == [1, 2, 3]
    opened = [request for request in served.requests if request.url.path.endswith("events")]
    lasts = [request.headers.get("last-event-id") for request in opened]
    assert lasts == [None, "1.1.-1", "1.1.-1", "1.1.-1"]
    assert opened[0].url.path == "/v1/jobs/j1aaaa/events", "a name may come to mean another job"


def test_a_stream_says_when_it_is_over(play: Play) -> None:
    served, client = play(ok(ROW), stream(event("1", a=1) + b"event: end\ndata: {}\n\n"))
    assert [one.row for one in client.events("a")] == [{"a": 1}]
    assert len(served.requests) == 2


def test_a_place_may_come_without_a_row(play: Play) -> None:
    body = event("1", a=1) + b"id: 2\n\n"
    served, client = play(ok(ROW), stream(Cut(body)), stream(b""), ok(OVER))
    assert [one.id for one in client.events("a")] == ["1"]
    assert served.requests[2].headers["last-event-id"] == "2"


def test_a_stream_that_ends_early_is_opened_again(play: Play) -> None:
    _, client = play(ok(ROW), stream(event("1", a=1)), ok(ROW), stream(b""), ok(OVER))
    assert [one.id for one in client.events("a")] == ["1"]


def test_what_there_is_now(play: Play) -> None:
    served, client = play(ok(ROW), stream(event("5", a=1)))
    (one,) = client.events("a", after="4", follow=False)
    assert (one.id, one.row) == ("5", {"a": 1})
    assert served.requests[1].url.params["follow"] == "false"
    assert served.requests[1].headers["last-event-id"] == "4"


def test_a_stream_that_never_comes(play: Play) -> None:
    _, client = play(ok(ROW), *[httpx.ConnectError("no")] * 3, retries=2)
    with pytest.raises(Unreachable):
        list(client.events("a"))
    _, client = play(ok(ROW), refused(403, "no"))
    with pytest.raises(ServiceError, match="no"):
        list(client.events("a"))


def test_a_file_is_sent_once(play: Play, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"{}")
    served, client = play(ok({"data": []}), ok({"id": "file-1"}), ok({"data": [{"id": "file-2"}]}))
    assert client.upload(tmp_path / "x.jsonl") == "file-1"
    assert client.upload(tmp_path / "x.jsonl") == "file-2", "the tenant has it"
    assert served.paths == ["GET /v1/files", "POST /v1/files", "GET /v1/files"]
    assert b'filename="x.jsonl"' in served.requests[1].content


LINES = b'{"text": "a"}\n{"text": "b"}\n'


@pytest.mark.parametrize(
    "content",
    [gzip.compress(LINES, mtime=0), b' [{"text": "a"}, {"text": "b"}]'],
    ids=["gzip", "array"],
)
def test_a_file_is_sent_as_json_lines(play: Play, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    served, client = play(ok({"data": []}), ok({"id": "file-1"}))
    client.upload(tmp_path / "x")
    asked, sent = served.requests
    assert asked.url.params["sha256"] == hashlib.sha256(LINES).hexdigest()
    assert b"\r\n\r\n" + LINES + b"\r\n--" in sent.content


def test_a_file_whose_answer_was_lost_is_not_sent_twice(play: Play, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"{}")
    none, there = ok({"data": []}), ok({"data": [{"id": "file-1"}]})
    served, client = play(none, httpx.ReadError("cut"), there)
    assert client.upload(tmp_path / "x.jsonl") == "file-1"
    assert served.paths == ["GET /v1/files", "POST /v1/files", "GET /v1/files"]


def test_with_an_event_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"{}")
    submitted = ok({"jobs": [ROW]}, 201)
    cut = stream(Cut(event("1", a=1)))
    served = Served(
        [
            *(ok({"data": []}), ok({"id": "file-1"}), httpx.ConnectError("no"), submitted),
            *(ok(ROW), cut, stream(event("2", a=2)), ok(OVER)),
            *(ok({"jobs": [ROW], "next": None}), ok({}), ok({}), ok({}), ok({"rows": []})),
            *[ok(ROW)] * 3,
        ]
    )

    async def sleep(seconds: float) -> None:
        served.waits.append(seconds)

    async def run() -> list[Any]:
        transport = httpx.MockTransport(served)
        async with AsyncClient(ADDRESS, "secret", transport=transport) as client:
            file = await client.upload(tmp_path / "x.jsonl")
            made = await client.submit({"name": "a"})
            seen = [one.id async for one in client.events("a")]
            jobs = [job.id async for job in client.jobs()]
            await client.cluster(), await client.groups(), await client.decisions()
            metrics = await client.metrics("a")
            await client.cancel("a"), await client.pause("a"), await client.resume("a")
            return [file, made.is_new, seen, jobs, metrics]

    monkeypatch.setattr("asyncio.sleep", sleep)
    assert asyncio.run(run()) == ["file-1", True, ["1", "2"], ["j1aaaa"], []]
    assert served.requests[6].headers["last-event-id"] == "1"


def test_both_clients_have_the_same_methods() -> None:
    def methods(client: type) -> dict[str, inspect.Signature]:
        return {
            name: inspect.signature(member)
            for name, member in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    plain, awaited = methods(Client), methods(AsyncClient)
    assert plain.keys() == awaited.keys()
    assert len(plain) > 10
    for name, signature in plain.items():
        mine, other = signature.parameters, awaited[name].parameters
        assert list(mine) == list(other), name
        for key, parameter in mine.items():
            same = other[key]
            assert (parameter.kind, parameter.default) == (same.kind, same.default), (name, key)
            if key != "transport":  # httpx has one of each kind
                assert parameter.annotation == same.annotation, (name, key)
        answers = awaited[name].return_annotation.replace("AsyncIterator", "Iterator")
        assert signature.return_annotation == answers, name


def test_states_are_those_of_the_store() -> None:
    assert list(JobState) == [str(state) for state in store.JobState]
    assert {str(s) for s in JobState if s.is_over} == {str(s) for s in store.OVER}


def test_it_needs_little() -> None:
    heavy = ("torch", "numpy", "sqlalchemy", "fastapi", "transformers")
    assert not imported("import tlora_megatron.client", *heavy)
