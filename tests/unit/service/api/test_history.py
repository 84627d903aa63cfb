"""`/events` and `/metrics` of a job: replayed, resumed, followed, and seen by its tenant alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.http_service import Door, bearer, listening
from tests.helpers.launch import HANG_S
from tests.helpers.stored_jobs import finish, serve_gang, start
from tlora_megatron.service.api.native.history import Following, Listener, last_rows
from tlora_megatron.service.history import Place
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.store import JobState, NewJob


def _running(door: Door, tenant: str = "ann") -> str:
    new = NewJob(name="a", document={"name": "a"}, base="b", key="a")
    job = door.store.jobs.submit([new], tenant=tenant)[0].id
    if not door.store.gangs.live():
        serve_gang(door.store, door.home)
    start(door.store, job)
    return job


def _step(door: Door, job: str, step: int) -> None:
    with (make_folder(door.home.job(job)) / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 0.5}) + "\n")


def _rows(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_a_history_is_replayed_and_goes_on_behind_any_event(door: Door) -> None:
    job = _running(door)
    for step in (1, 2):
        _step(door, job, step)
    finish(door.store, job)
    client = door.client()
    whole = client.get(f"/v1/jobs/{job}/events")
    assert whole.headers["content-type"].startswith("text/event-stream")
    rows = _rows(whole.text)[:-1]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2]
    assert rows[-1]["to"] == "finished"
    assert "granted" not in {row.get("event") for row in rows}, "leases are not a tenant's business"
    assert whole.text.endswith("event: end\ndata: {}\n\n")
    ids = [line[4:] for line in whole.text.splitlines() if line.startswith("id: ")]
    told = [part for part in whole.text.split("\n\n") if part.startswith("id: ")]
    for index, place in enumerate(ids[:-1]):
        rest = client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": place})
        assert [p for p in rest.text.split("\n\n") if p.startswith("id: ")] == told[index + 1 :]
    assert client.get(f"/v1/jobs/{job}/events", params={"after": ids[-1]}).status_code == 204
    assert client.get(f"/v1/jobs/{job}/events", params={"after": "x"}).status_code == 400
    assert door.client("bob").get(f"/v1/jobs/{job}/events").status_code == 404
    admin = door.client("root", ("admin",)).get(f"/v1/jobs/{job}/events")
    assert "granted" in {row.get("event") for row in _rows(admin.text)}


def test_a_neighbour_s_part_in_a_death_is_not_told(door: Door) -> None:
    job = _running(door)
    why = "rank 1: job 'secret-of-bob' could not read /data/bob.jsonl"
    door.store.jobs.change(job, JobState.QUEUED, release=why, why=why)
    told = door.client().get(f"/v1/jobs/{job}/events", params={"follow": False}).text
    assert "its gang ended or was arranged anew" in told
    assert "secret" not in told
    error = f"job 'a' cannot be prepared: {door.home.root}/jobs/x: disk"
    door.store.jobs.change(job, JobState.FAILED, why=error, error=error)
    shown = door.client().get(f"/v1/jobs/{job}").json()["error"]
    assert shown == "job 'a' cannot be prepared: jobs/x: disk"


def test_numbers_are_read_from_the_end(door: Door, tmp_path: Path) -> None:
    job = _running(door)
    client = door.client()
    assert client.get(f"/v1/jobs/{job}/metrics").json() == {"rows": []}
    for step in range(1, 6):
        _step(door, job, step)
    rows = client.get(f"/v1/jobs/{job}/metrics", params={"tail": 2}).json()["rows"]
    assert [row["step"] for row in rows] == [4, 5]
    long = tmp_path / "long.jsonl"
    line = json.dumps({"step": 1, "text": "x" * 3000})
    long.write_text(f"{line}\n" * 50 + '{"step": 2')
    assert len(last_rows(long, 3)) == 3
    assert len(last_rows(long, 100)) == 50


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_stream_over_a_port_follows_to_the_end(door: Door) -> None:
    job = _running(door)
    _step(door, job, 1)

    async def follow(address: str) -> list[int]:
        steps = []
        headers = bearer(door.token("ann"))
        async with (
            httpx.AsyncClient(timeout=HANG_S) as client,
            client.stream("GET", f"{address}/v1/jobs/{job}/events", headers=headers) as answer,
        ):
            async for row in _events(answer.aiter_lines()):
                if row.get("kind") == "step":
                    steps.append(row["step"])
                    if len(steps) < 4:
                        await asyncio.to_thread(_step, door, job, len(steps) + 1)
                    else:
                        await asyncio.to_thread(finish, door.store, job)
        return steps

    with listening(door.app) as address:
        assert asyncio.run(follow(address)) == [1, 2, 3, 4]


def _listener(token: str = "t") -> Listener:
    return Listener(token, True, lambda row: row)


def test_many_listeners_cost_one_look_and_one_that_lags_loses_nothing(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlora_megatron.service.api.native.history._LOOK_S", 0.01)
    monkeypatch.setattr("tlora_megatron.service.api.native.history._KEPT", 5)
    job = _running(door)
    _step(door, job, 1)
    following = Following(door.store, door.home)

    async def listen(pause_s: float) -> list[int]:
        steps = []
        async for text in following.listen(job, Place(), _listener()):
            rows = _rows(text)
            steps += [row["step"] for row in rows if row.get("kind") == "step"]
            await asyncio.sleep(pause_s)
        return steps

    async def all_at_once() -> tuple[list[list[int]], int]:
        listeners = [asyncio.create_task(listen(0)) for _ in range(100)]
        listeners.append(asyncio.create_task(listen(0.02)))
        await asyncio.sleep(0.3)
        before = following.reads
        for step in range(2, 40):
            await asyncio.to_thread(_step, door, job, step)
        await asyncio.to_thread(finish, door.store, job)
        found = await asyncio.gather(*listeners)
        return found, following.reads - before

    found, reads = asyncio.run(all_at_once())
    assert all(steps == list(range(1, 40)) for steps in found)
    assert 0 < reads <= 40, "not one for each listener"


def test_a_stream_ends_with_its_token(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora_megatron.service.api.native.history._LOOK_S", 0.01)
    job = _running(door)
    made = door.store.tokens.make("ann")
    following = Following(door.store, door.home)

    async def listen() -> str:
        text = ""
        async for part in following.listen(job, Place(), _listener(made.token.id)):
            if not text:
                await asyncio.to_thread(door.store.tokens.revoke, made.token.id)
            text += part
        return text

    async def bounded() -> str:
        return await asyncio.wait_for(listen(), HANG_S)

    assert asyncio.run(bounded()).endswith("event: end\ndata: {}\n\n")
