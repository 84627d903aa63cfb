"""The page of a service, what its browser is told as it changes, and `/docs`.

A listener is told the parts of its tenant's view that have changed since it was last told. The page
is one file that loads nothing: its policy lets the browser run this very script alone.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from tlora_megatron.service.api.figures import LISTENERS
from tlora_megatron.service.api.gate import Caller, Reader, missing, too_many_streams
from tlora_megatron.service.api.page import views
from tlora_megatron.service.api.page.facts import Facts, Viewer, read_curves, read_facts
from tlora_megatron.service.api.page.views import PARTS, decision_page, jobs_of
from tlora_megatron.service.api.service import STREAM_HEADERS, Service, happens
from tlora_megatron.service.store import NotFound, StoreError
from tlora_megatron.service.store.database import to_json
from tlora_megatron.training.metrics import METRICS_FILE

TAGS = [
    {"name": "jobs", "description": "Jobs as `tlora train` describes them: sent, seen, ended."},
    {"name": "files of jobs", "description": "Adapters and checkpoints, as zip archives."},
    {"name": "openai", "description": "What the `openai` client speaks."},
    {"name": "tinker", "description": "What the `tinker` client speaks."},
]
"""The order of the page, and a line for each part."""


def docs_router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    text = _read("docs.html")
    scripts, styles = (re.findall(f"<{k}>(.*?)</{k}>", text, re.S) for k in ("script", "style"))
    policy = _policy(scripts, styles)
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}

    @routes.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return routes


def _policy(scripts: Iterable[str], styles: Iterable[str], more: str = "") -> str:
    """Lets the browser run a page's own scripts, and load nothing but what they ask for."""
    run, draw = (" ".join(f"'{_digest(text)}'" for text in texts) for texts in (scripts, styles))
    return (
        f"default-src 'none'; script-src {run}; style-src {draw}; connect-src 'self'; {more}"
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_LOOK_S = 0.25
"""Between two looks for events."""
_REFRESH_S = 1.0
"""Losses and speeds are no events: they are read again after so long."""
_SHARE = 4
"""A look that took a second is followed by so many seconds without one."""
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

    def check_room(self, viewer: Viewer) -> None:
        sight = self._sights.get((viewer.tenant, viewer.sees_all))
        if sight is not None and sight.listeners >= MOST_STREAMS:
            raise too_many_streams(MOST_STREAMS)

    async def listen(self, viewer: Viewer, token: str) -> AsyncIterator[bytes]:
        """Yields server-sent events until the token is revoked; all parts first, then changes."""
        key = (viewer.tenant, viewer.sees_all)
        sight = self._sights.setdefault(key, _Sight(viewer))
        sight.listeners += 1
        LISTENERS.inc()
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
                elif not await happens(self._changed):
                    yield b": alive\n\n"
            yield b"event: revoked\ndata: {}\n\n"
        finally:
            sight.listeners -= 1
            LISTENERS.dec()
            if not sight.listeners:
                self._sights.pop(key, None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        """Looks until nobody listens."""
        last, read_s = -1, float("-inf")
        while self._sights:
            begin_s = time.monotonic()
            try:
                new = await run_in_threadpool(self._store.events.last)
                is_awaited = any(not sight.parts for sight in self._sights.values())
                if new != last or begin_s - read_s >= _REFRESH_S or is_awaited:
                    await self._refresh()
                    last, read_s = new, begin_s
            except StoreError:
                await asyncio.sleep(_REFRESH_S)
            took_s = time.monotonic() - begin_s
            await asyncio.sleep(max(_LOOK_S, _SHARE * took_s))

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
        shown = [
            (sight, {name: event(name, view(facts, sight.viewer)) for name, view in PARTS.items()})
            for sight in sights
        ]
        for sight, parts in shown:
            body = decision_page(found, rows, sight.viewer, NEWEST)
            parts["decisions"] = event("decisions", body)
        return shown, frozenset(revoked)


def event(name: str, body: object) -> bytes:
    return f"event: {name}\ndata: {to_json(body)}\n\n".encode()


_SCRIPTS = ("text", "stream", "charts", "machines", "groups", "sweeps", "jobs", "decisions", "main")
"""Parts of the script in the order in which they need each other."""


@cache
def page() -> str:
    return _read("page.html").replace("{style}", _style()).replace("{script}", _script())


@cache
def _style() -> str:
    shared = files("tlora_megatron.page").joinpath("page.css").read_text(encoding="utf-8")
    return shared + _read("live.css") + _read("parts.css")


@cache
def _script() -> str:
    """All parts in one function's scope: nothing of them is global."""
    parts = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";(() => {{\n{parts}\n}})();'


def _read(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADERS = {
    "Content-Security-Policy": _policy([_script()], [_style()], "img-src data:; "),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}


Mine = Annotated[bool, Query(description="an admin sees its own tenant's jobs only")]
Limit = Annotated[int, Query(ge=1, le=200)]
Before = Annotated[int | None, Query(ge=0, lt=2**63, description="`next` of the page before")]


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["cluster"])
    watching = Watching(service)
    service.closers.append(watching.close)

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page(), headers=HEADERS)

    @routes.get("/v1/stream")
    async def stream(caller: Reader, mine: Mine = False) -> StreamingResponse:
        """Server-sent events with all that the page draws: each part at once, and when it changes.

        The events are `cluster`, `groups`, `jobs`, `timeline`, `figures` and `decisions`, with what
        the routes of these names answer, and `sweeps`. A client that connects anew is told all of
        it again.
        """
        viewer = viewer_of(caller, mine=mine)
        watching.check_room(viewer)
        events = watching.listen(viewer, caller.token)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)

    _add_views(routes, service)
    return routes


def _add_views(routes: APIRouter, service: Service) -> None:
    """Adds the views that are asked for one at a time."""

    async def view(draw: Callable[[Facts, Viewer], views.View], viewer: Viewer) -> views.View:
        facts = await service.read(read_facts, service, frozenset({viewer.scope}))
        return {"at": facts.at, **draw(facts, viewer)}

    @routes.get("/v1/cluster")
    async def cluster(caller: Reader) -> dict[str, Any]:
        """Machines and their GPUs: which gang holds each, what is healthy, what is aside."""
        return await view(views.cluster, viewer_of(caller))

    @routes.get("/v1/groups")
    async def groups(caller: Reader, mine: Mine = False) -> dict[str, Any]:
        """Gangs: layout, members, speeds measured and predicted, slowdowns against bounds, losses.

        Others' jobs are there as names that mean nothing, without speed, step or loss.
        """
        return await view(views.groups, viewer_of(caller, mine=mine))

    @routes.get("/v1/timeline")
    async def timeline(caller: Reader, mine: Mine = False) -> dict[str, Any]:
        """Which gang held which GPUs in the last half hour, with which jobs."""
        return await view(views.timeline, viewer_of(caller, mine=mine))

    @routes.get("/v1/decisions")
    async def decisions(
        caller: Reader, limit: Limit = 50, before: Before = None, mine: Mine = False
    ) -> dict[str, Any]:
        """The scheduler's decisions, newest first; a tenant is told what touches its jobs.

        `next` is what to ask for as `before` to read on; null where there is no more.
        """
        viewer = viewer_of(caller, mine=mine)
        found = await service.read(service.store.decisions.newest, limit, before=before)
        rows = await service.read(service.store.jobs.many, views.jobs_of(found))
        return views.decision_page(found, {job.id: job for job in rows}, viewer, limit)

    @routes.get("/v1/curves/{job}")
    async def curve(
        job: str, caller: Reader, points: Annotated[int, Query(ge=2, le=2000)] = 300
    ) -> dict[str, Any]:
        """A job's losses of steps and of evaluations, each thinned to a number of points."""
        try:
            row = await service.read(service.store.jobs.get, job)
        except NotFound:
            raise missing("a job's id", job) from None
        if not viewer_of(caller).may_see(row):
            raise missing("a job's id", job)
        path = service.home.job(row.id) / METRICS_FILE
        return {"job": row.id, **await service.read(read_curves, path, points)}


def viewer_of(caller: Caller, *, mine: bool = False) -> Viewer:
    """The view of a caller: an admin sees all, unless it wants to look as its tenant does."""
    return Viewer(tenant=caller.tenant, sees_all=caller.is_admin and not mine)
