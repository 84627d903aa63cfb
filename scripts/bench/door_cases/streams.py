"""1,000 listeners of the service's events: how long until all of them have heard of one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import urlsplit

from scripts.bench.door_cases.notes import Notes
from scripts.bench.door_cases.serving import Served, serving
from scripts.bench.live_store import new_job

TENANTS = 20
EVENTS = 10
_PATIENCE_S = 60.0


class Listener:
    """One connection that follows the page's stream, read as bytes."""

    def __init__(self) -> None:
        self.heard: dict[str, float] = {}
        """When an event was heard, by the word that marks it."""
        self._tail = b""

    async def follow(self, address: str, token: str, marks: set[str]) -> None:
        """Reads until it is cancelled."""
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


def measure(notes: Notes, folder: Path, *, listeners: int) -> None:
    """Notes when the middle, the last but a hundredth and the last listener heard of an event."""
    with serving(folder / "streams") as served, notes.load("streams"):
        tokens = served.tokens(TENANTS)
        times = asyncio.run(_listen(served, tokens, listeners))
    what = f"{listeners:,} listeners of {TENANTS} tenants"
    notes.spread(f"{what}: event to a listener", [time for own in times for time in own])
    notes.spread(f"{what}: event to all", [max(own) for own in times])


async def _listen(served: Served, tokens: list[str], count: int) -> list[list[float]]:
    """Seconds from each event to each listener."""
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
    from dataclasses import replace

    with served.store.transaction():
        for number in range(TENANTS):
            job = replace(new_job(), name=f"{mark}{number}")
            served.store.jobs.submit([job], tenant=f"tenant-{number}")
