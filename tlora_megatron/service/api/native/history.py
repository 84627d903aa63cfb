"""`/v1/jobs/{job}/events` and `/metrics`: jobs are followed for all who listen, by one look."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from tlora_megatron.service.api.gate import Reader, refused, too_many_streams
from tlora_megatron.service.api.native.jobs import answers, shown_event, visible_job
from tlora_megatron.service.api.service import STREAM_HEADERS, Service, happens
from tlora_megatron.service.history import History, Place, Told, last_rows
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import Store, StoreError
from tlora_megatron.training.metrics import METRICS_FILE

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_SHARE = 4
"""A look that took a second is followed by so many seconds without one."""
_KEPT = 1000
"""Rows of a job that listeners may lag behind; one that lags further reads the job by itself."""

MOST_STREAMS = 2000
"""Open at a time, of one tenant: each holds a connection, of which the process has so many."""

_END = "event: end\ndata: {}\n\n"

View = Callable[[dict[str, Any]], dict[str, Any] | None]
"""A row as one kind of listener sees it."""


@dataclass(slots=True)
class _Row:
    told: Told
    texts: dict[bool, str | None] = field(default_factory=dict)
    """Encoded once for administrators and once for the tenant."""


@dataclass(eq=False, slots=True)
class _Channel:
    """A job that somebody listens to."""

    job: str
    history: History
    listeners: int = 0
    rows: deque[_Row] = field(default_factory=lambda: deque(maxlen=_KEPT))
    number: int = 0
    """Rows so far; the last one of `rows` has this number."""
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    stamp: tuple[int, ...] = ()
    """Stamp of the job's file of metrics when it was last read."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens, and how that one sees rows."""

    token: str
    is_admin: bool
    view: View
    tenant: str = ""


class Following:
    """Follows the store while somebody listens."""

    def __init__(self, store: Store, home: Home) -> None:
        self._store, self._home = store, home
        self._channels: dict[str, _Channel] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._seen: int | None = None
        self._revoked: frozenset[str] = frozenset()
        self._open: Counter[str] = Counter()
        self.reads = 0
        """Jobs' histories read so far, by looks."""

    def check_room(self, tenant: str) -> None:
        if self._open[tenant] >= MOST_STREAMS:
            raise too_many_streams(MOST_STREAMS)

    async def read(self, job: str, after: Place) -> tuple[list[Told], bool]:
        """The events of a job behind a place so far, and True if nothing will follow."""
        return await run_in_threadpool(lambda: History(self._store, self._home, job, after).read())

    async def listen(self, job: str, after: Place, listener: Listener) -> AsyncIterator[str]:
        """Yields server-sent events behind a place, until the job is over or the token revoked."""
        channel = self._join(job)
        self._open[listener.tenant] += 1
        try:
            await channel.is_ready.wait()
            place = after
            while listener.token not in self._revoked:
                cursor = channel.number
                news, is_over = await self.read(job, place)
                for told in news:
                    place = _later(place, told)
                    yield _event(place, _text(listener.view, told))
                if is_over:
                    break
                lags = False
                async for reached, text in self._live(channel, cursor, place, listener):
                    place = reached
                    lags = text is None
                    if text is not None:
                        yield text
                if not lags:
                    break
            yield _END
        finally:
            self._open[listener.tenant] -= 1
            self._leave(channel)

    async def replay(self, job: str, after: Place, listener: Listener) -> AsyncIterator[str]:
        """Yields what is there behind a place, and does not wait for more."""
        place = after
        for told in (await self.read(job, place))[0]:
            place = _later(place, told)
            yield _event(place, _text(listener.view, told))
        yield _END

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _live(
        self, channel: _Channel, cursor: int, place: Place, listener: Listener
    ) -> AsyncIterator[tuple[Place, str | None]]:
        """Yields rows as they come, until the end, or None when this listener lags too far."""
        while listener.token not in self._revoked:
            changed, behind = self._changed, channel.number - cursor
            if behind > len(channel.rows):
                yield place, None
                return
            new = list(channel.rows)[len(channel.rows) - behind :]
            cursor = channel.number
            for row in new:
                if _is_new(place, row.told):
                    place = _later(place, row.told)
                    if listener.is_admin not in row.texts:
                        row.texts[listener.is_admin] = _text(listener.view, row.told)
                    yield place, _event(place, row.texts[listener.is_admin])
            if channel.is_over and cursor == channel.number:
                return
            if not new and not await happens(changed):
                yield place, ": alive\n\n"

    def _join(self, job: str) -> _Channel:
        channel = self._channels.get(job)
        if channel is None:
            channel = _Channel(job, History(self._store, self._home, job))
            self._channels[job] = channel
        channel.listeners += 1
        if self._task is None or self._task.done():
            self._seen = None
            self._task = asyncio.create_task(self._follow())
        return channel

    def _leave(self, channel: _Channel) -> None:
        channel.listeners -= 1
        if not channel.listeners:
            self._channels.pop(channel.job, None)

    async def _follow(self) -> None:
        """Looks until nobody listens."""
        while self._channels:
            begin_s = time.monotonic()
            try:
                revoked = self._revoked
                found = await run_in_threadpool(self._look, list(self._channels.values()))
                self._tell(found, wake=revoked != self._revoked)
            except StoreError as error:
                logger.warning("listeners wait: %s", error)
            await asyncio.sleep(max(_LOOK_S, _SHARE * (time.monotonic() - begin_s)))

    def _tell(self, found: Sequence[tuple[_Channel, list[Told], bool]], *, wake: bool) -> None:
        """Hands news to listeners. What a first look finds they read by themselves."""
        for channel, news, is_over in found:
            if channel.is_ready.is_set():
                channel.rows.extend(_Row(told) for told in news)
                channel.number += len(news)
            channel.is_over = is_over
            channel.is_ready.set()
        if found or wake:
            self._changed.set()
            self._changed = asyncio.Event()

    def _look(self, channels: Iterable[_Channel]) -> list[tuple[_Channel, list[Told], bool]]:
        """News of the jobs that have any."""
        changed = self._changed_jobs()
        tokens = self._store.tokens.all()
        self._revoked = frozenset(token.id for token in tokens if token.revoked_at is not None)
        found = []
        for channel in channels:
            stamp = self._stamp(channel.job)
            if channel.job in changed or stamp != channel.stamp or not channel.is_ready.is_set():
                self.reads += 1
                try:
                    found.append((channel, *channel.history.read()))
                except (OSError, ValueError) as error:
                    logger.warning("job %s is read later: %s", channel.job, error)
                    continue
                channel.stamp = stamp
        return found

    def _changed_jobs(self) -> set[str | None]:
        """Jobs with events since the last look; the first one reads all that is listened to."""
        last = self._store.events.last()
        seen = last if self._seen is None else self._seen
        events = self._store.events.after(seen, limit=None) if seen < last else []
        self._seen = last
        return {event.job for event in events}

    def _stamp(self, job: str) -> tuple[int, ...]:
        try:
            found = os.stat(self._home.job(job) / METRICS_FILE)
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns


_COUNTS = {"event": "seq", "step": "step", "evaluation": "evaluation"}
"""Kind of a row -> the field of a place that counts its kind."""


def _is_new(place: Place, told: Told) -> bool:
    name = _COUNTS[told.row["kind"]]
    return bool(getattr(told.place, name) > getattr(place, name))


def _later(place: Place, told: Told) -> Place:
    """The place behind a row that was told."""
    kind = told.row["kind"]
    if kind == "event":
        return replace(place, seq=max(place.seq, told.place.seq))
    if kind == "step":
        return replace(place, step=told.place.step)
    return replace(place, evaluation=told.place.evaluation)


def _text(view: View, told: Told) -> str | None:
    row = view(told.row)
    return None if row is None else json.dumps(row, separators=(",", ":"))


def _event(place: Place, text: str | None) -> str:
    """A server-sent event; one that this listener must not see moves its place on alone."""
    return f"id: {place}\n\n" if text is None else f"id: {place}\ndata: {text}\n\n"


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/jobs/{job}", tags=["jobs"])
    following = Following(service.store, service.home)
    service.closers.append(following.close)

    @routes.get(
        "/events",
        response_class=StreamingResponse,
        responses={**answers(404), 200: {"content": {"text/event-stream": {}}}},
    )
    async def events(
        job: str,
        caller: Reader,
        last_event_id: Annotated[str | None, Header()] = None,
        after: Annotated[str | None, Query(description="as Last-Event-ID")] = None,
        follow: bool = True,
    ) -> Response:
        """Streams what has happened to a job, its steps and evaluations, and then what happens.

        Server-sent events, whose data are the rows of `tlora logs --json`. A client that was cut
        off sends the id of the last event as `Last-Event-ID` and goes on behind it; browsers do so
        by themselves. The event `end` is the last one; a client that asks again then gets 204.
        """
        found = await service.read(visible_job, service, job, caller)
        place = _place(last_event_id or after)
        view = partial(shown_event, service, caller=caller)
        listener = Listener(caller.token, caller.is_admin, view, caller.tenant)
        if place != Place() and found.state.is_over:
            news, _ = await following.read(found.id, place)
            if not news:
                return Response(status_code=204)
        stream: AsyncIterator[str]
        if follow:
            following.check_room(caller.tenant)
            stream = following.listen(found.id, place, listener)
        else:
            stream = following.replay(found.id, place, listener)
        return StreamingResponse(stream, media_type="text/event-stream", headers=STREAM_HEADERS)

    @routes.get("/metrics", responses=answers(404))
    async def metrics(
        job: str,
        caller: Reader,
        tail: Annotated[int, Query(ge=1, le=10_000, description="how many lines")] = 100,
    ) -> dict[str, Any]:
        """The last lines of a job's numbers: a row a step or evaluation."""
        found = await service.read(visible_job, service, job, caller)
        path = service.home.job(found.id) / METRICS_FILE
        return {"rows": await service.read(last_rows, path, count=tail)}

    return routes


def _place(text: str | None) -> Place:
    try:
        return Place() if text is None else Place.read(text)
    except ValueError:
        raise refused("Last-Event-ID", "be the id of an event of this stream", text) from None
