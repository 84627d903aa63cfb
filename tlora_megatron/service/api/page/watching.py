"""Looks at the store for all who follow the page: one look serves everybody.

Each listener is told the parts of its tenant's view that have changed since it was last told. What
it has not taken when the next change comes it never sees: parts are states, not a log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.service.api.page.facts import Facts, Viewer, read_facts
from tlora_megatron.service.api.page.views import PARTS, decision_page, jobs_of
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import StoreError
from tlora_megatron.service.store.database import to_json

_LOOK_S = 0.25
"""Between two looks for events."""
_REFRESH_S = 1.0
"""Losses and speeds are no events: they are read again after so long."""
_SHARE = 4
"""A look that took a second is followed by so many seconds without one."""
_ALIVE_S = 15.0
MOST_STREAMS = 500
"""Open at a time, of one tenant."""
NEWEST = 20
"""Decisions that a listener is told of at once; older ones by pages."""


@dataclass(eq=False, slots=True)
class _Sight:
    """The state that all listeners of one tenant see."""

    viewer: Viewer
    listeners: int = 0
    parts: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Encoded event of each part, and the number of the look at which it changed."""


class Watching:
    """Follows the store while somebody listens."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        self._sights: dict[tuple[str, bool], _Sight] = {}
        self._changed = asyncio.Event()
        self._look = 0
        self._task: asyncio.Task[None] | None = None
        self._revoked: frozenset[str] = frozenset()

    @property
    def num_listeners(self) -> int:
        """Open streams."""
        return sum(sight.listeners for sight in self._sights.values())

    def check_room(self, viewer: Viewer) -> None:
        """Refuses a listener too many.

        Raises:
            ApiError: 429 if a tenant has as many streams open as it may.
        """
        sight = self._sights.get((viewer.tenant, viewer.sees_all))
        if sight is not None and sight.listeners >= MOST_STREAMS:
            raise ApiError(
                429,
                f"streams of a tenant must be {MOST_STREAMS} at most, got one more: close some",
                headers={"Retry-After": "5"},
            )

    async def listen(self, viewer: Viewer, token: str) -> AsyncIterator[bytes]:
        """Yields server-sent events until the token is revoked; all parts first, then changes."""
        key = (viewer.tenant, viewer.sees_all)
        sight = self._sights.setdefault(key, _Sight(viewer))
        sight.listeners += 1
        try:
            if self._task is None or self._task.done():
                self._changed = asyncio.Event()
                self._task = asyncio.create_task(self._follow())
            seen = -1
            while token not in self._revoked:
                parts = sight.parts.values()
                new = [text for number, text in parts if number > seen]
                seen = max((number for number, _ in parts), default=seen)
                if new:
                    yield b"".join(new)
                elif not await self._wait():
                    yield b": alive\n\n"
            yield b"event: revoked\ndata: {}\n\n"
        finally:
            sight.listeners -= 1
            if not sight.listeners:
                self._sights.pop(key, None)

    async def close(self) -> None:
        """Stops looking."""
        if self._task is not None:
            self._task.cancel()

    async def _wait(self) -> bool:
        """Waits for the next change; False if there was none for long."""
        try:
            async with asyncio.timeout(_ALIVE_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _follow(self) -> None:
        """Looks until nobody listens."""
        last, read_s = -1, float("-inf")
        while self._sights:
            begin_s = time.monotonic()
            try:
                new = await run_in_threadpool(self._store.events.last)
                if new != last or begin_s - read_s >= _REFRESH_S or self._has_newcomer():
                    await self._refresh()
                    last, read_s = new, begin_s
            except StoreError:
                await asyncio.sleep(_REFRESH_S)
            took_s = time.monotonic() - begin_s
            await asyncio.sleep(max(_LOOK_S, _SHARE * took_s))

    def _has_newcomer(self) -> bool:
        return any(not sight.parts for sight in self._sights.values())

    async def _refresh(self) -> None:
        sights = list(self._sights.values())
        self._look += 1
        changes, revoked = await run_in_threadpool(self._read, sights)
        is_changed, self._revoked = revoked != self._revoked, revoked
        for sight, parts in changes:
            for name, text in parts.items():
                if name not in sight.parts or sight.parts[name][1] != text:
                    sight.parts[name] = (self._look, text)
                    is_changed = True
        if is_changed:
            self._changed.set()
            self._changed = asyncio.Event()

    def _read(
        self, sights: list[_Sight]
    ) -> tuple[list[tuple[_Sight, dict[str, bytes]]], frozenset[str]]:
        """Reads the present state of every sight, and the tokens that were revoked."""
        facts = read_facts(self._service, frozenset(sight.viewer.scope for sight in sights))
        found = self._store.decisions.newest(NEWEST)
        rows = {job.id: job for job in self._store.jobs.many(jobs_of(found))}
        revoked = {token.id for token in self._store.tokens.all() if token.revoked_at is not None}
        shown = [(sight, _encoded(facts, sight.viewer)) for sight in sights]
        for sight, parts in shown:
            body = decision_page(found, rows, sight.viewer, NEWEST)
            parts["decisions"] = event("decisions", body)
        return shown, frozenset(revoked)


def _encoded(facts: Facts, viewer: Viewer) -> dict[str, bytes]:
    return {name: event(name, view(facts, viewer)) for name, view in PARTS.items()}


def event(name: str, body: object) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: {to_json(body)}\n\n".encode()
