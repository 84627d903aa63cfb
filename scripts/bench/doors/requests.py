"""100 submits a second beside 20 lists a second, with 10,000 jobs stored; 1,000 that listen."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from scripts.bench.doors.serving import BASE, Served, serving
from scripts.bench.harness.rows import Figures
from scripts.bench.live_store import new_job

STORED = 10_000
TENANTS = 20
SUBMITS_PER_S, LISTS_PER_S = 100, 20
_LINE = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}


def measure_requests(notes: Figures, folder: Path, *, seconds: float) -> None:
    with serving(folder / "requests") as served, notes.load("requests: "):
        tokens = served.tokens(TENANTS)
        for number in range(TENANTS):
            jobs = [new_job() for _ in range(STORED // TENANTS)]
            served.store.jobs.submit(jobs, tenant=f"tenant-{number}")
        submits, lists, took_s, cpu_s = asyncio.run(_load(served, tokens, seconds))
    what = f"{STORED:,} jobs stored, {SUBMITS_PER_S} submits/s + {LISTS_PER_S} lists/s"
    notes.row(f"{what}: submits answered", len(submits) / took_s, "1/s")
    number = len(submits) + len(lists)
    notes.row(f"{what}: CPU of the server for a request", 1e3 * cpu_s / number, "ms")
    notes.spread(f"{what}: submit", submits, p99_ms=50.0)
    notes.spread(f"{what}: list of 100", lists, p99_ms=50.0)


async def _load(
    served: Served, tokens: list[str], seconds: float
) -> tuple[list[float], list[float], float, float]:
    """Seconds of submits and of lists, of all of it, and of the server's CPU."""
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=served.address, limits=limits, timeout=60) as client:
        files = [await _upload(client, token) for token in tokens]
        submits: list[float] = []
        lists: list[float] = []

        async def submit(number: int) -> None:
            token, file = tokens[number % TENANTS], files[number % TENANTS]
            headers = {**_bearer(token), "Idempotency-Key": uuid.uuid4().hex}
            body = json.dumps(_document(file))
            submits.append(
                await _timed(lambda: client.post("/v1/jobs", content=body, headers=headers))
            )

        async def page(number: int) -> None:
            headers = _bearer(tokens[number % TENANTS])
            lists.append(await _timed(lambda: client.get("/v1/jobs", headers=headers)))

        await asyncio.gather(*(submit(number) for number in range(TENANTS)), page(0))
        submits.clear(), lists.clear()
        begin_s, cpu_s = time.perf_counter(), served.cpu_s
        await asyncio.gather(
            _at_rate(SUBMITS_PER_S, seconds, submit), _at_rate(LISTS_PER_S, seconds, page)
        )
        return submits, lists, time.perf_counter() - begin_s, served.cpu_s - cpu_s


async def _at_rate(rate: float, seconds: float, call: Callable[[int], Awaitable[None]]) -> None:
    """Calls at fixed times, whether or not those before have returned."""
    begin_s, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begin_s + number / rate - time.perf_counter()))
        tasks.append(asyncio.ensure_future(call(number)))
    await asyncio.gather(*tasks)


async def _timed(call: Callable[[], Awaitable[httpx.Response]]) -> float:
    begin_s = time.perf_counter()
    answer = await call()
    took_s = time.perf_counter() - begin_s
    assert answer.is_success, answer.text
    return took_s


async def _upload(client: httpx.AsyncClient, token: str) -> str:
    file = ("train.jsonl", "\n".join([json.dumps(_LINE)] * 10).encode())
    answer = await client.post(
        "/v1/files", data={"purpose": "fine-tune"}, files={"file": file}, headers=_bearer(token)
    )
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def _document(file: str) -> dict[str, Any]:
    return {
        "base_model": BASE, "name": uuid.uuid4().hex, "data": {"train": file},
        "lora": {"rank": 16, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}, "batch_size": 8,
        "max_seq_len": 64, "max_steps": 200,
    }  # fmt: skip


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


EVENTS = 10
_PATIENCE_S = 60.0


class Listener:
    """One connection that follows the page's stream, read as bytes."""

    def __init__(self) -> None:
        self.heard: dict[str, float] = {}
        """When an event was heard, by the word that marks it."""
        self._tail = b""

    async def follow(self, address: str, token: str, marks: set[str]) -> None:
        host, port = urlsplit(address).hostname, urlsplit(address).port
        reader, writer = await asyncio.open_connection(host, port)
        head = f"GET /v1/stream HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n"
        writer.write(head.encode())
        try:
            while chunk := await reader.read(1 << 16):
                text = self._tail + chunk
                now_s = time.perf_counter()
                for mark in marks - self.heard.keys():
                    if mark.encode() in text:
                        self.heard[mark] = now_s
                self._tail = chunk[-64:]
        finally:
            writer.close()


def measure_streams(notes: Figures, folder: Path, *, listeners: int) -> None:
    """Notes when the middle, the last but a hundredth and the last listener heard of an event."""
    with serving(folder / "streams") as served, notes.load("streams: "):
        tokens = served.tokens(TENANTS)
        times = asyncio.run(_listen(served, tokens, listeners))
    what = f"{listeners:,} listeners of {TENANTS} tenants"
    notes.spread(f"{what}: event to a listener", [time for own in times for time in own])
    notes.spread(f"{what}: event to all", [max(own) for own in times])


async def _listen(served: Served, tokens: list[str], count: int) -> list[list[float]]:
    marks: set[str] = set()
    all_of = [Listener() for _ in range(count)]
    tasks = []
    for number, listener in enumerate(all_of):
        follow = listener.follow(served.address, tokens[number % TENANTS], marks)
        tasks.append(asyncio.create_task(follow))
        if number % 50 == 49:
            await asyncio.sleep(0.05)
    times = []
    for number in range(EVENTS + 1):
        mark = f"mark-{number:04}-"
        marks.add(mark)
        begin_s = time.perf_counter()
        await asyncio.to_thread(_submit, served, mark)
        end_s = begin_s + _PATIENCE_S
        while any(mark not in one.heard for one in all_of):
            assert time.perf_counter() < end_s, f"all must hear of {mark}"
            await asyncio.sleep(0.01)
        times.append([one.heard[mark] - begin_s for one in all_of])
        marks.discard(mark)
        await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return times[1:]  # while the first was told, connections were still being made


def _submit(served: Served, mark: str) -> None:
    """One job of each tenant, in one change of the store."""
    with served.store.transaction():
        for number in range(TENANTS):
            job = replace(new_job(), name=f"{mark}{number}")
            served.store.jobs.submit([job], tenant=f"tenant-{number}")
