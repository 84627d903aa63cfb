"""Routes of the page, and of what it draws: machines, groups, decisions, the past, and a stream.

The page is one file that loads nothing. Its policy lets the browser run this very script and use
this very style, and connect to the service that sent it; whatever a name of a job may hold is text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tlora_megatron.service.api.errors import missing
from tlora_megatron.service.api.gate import Caller, Reader, Scraper
from tlora_megatron.service.api.page import views
from tlora_megatron.service.api.page.facts import Facts, Viewer, read_curve, read_facts
from tlora_megatron.service.api.page.metrics import exposition
from tlora_megatron.service.api.page.watching import Watching
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import NotFound
from tlora_megatron.training.metrics import METRICS_FILE

_SCRIPTS = ("text", "stream", "charts", "machines", "groups", "jobs", "decisions", "main")
"""Parts of the script in the order in which they need each other."""


@cache
def page() -> str:
    """The whole page."""
    return _read("page.html").replace("{style}", _style()).replace("{script}", _script())


def policy() -> str:
    """The content security policy: the limits of the page in the browser."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(_script())}'",
            f"style-src '{_digest(_style())}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


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
    "Content-Security-Policy": policy(),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}


Mine = Annotated[bool, Query(description="an admin sees its own tenant's jobs only")]
Limit = Annotated[int, Query(ge=1, le=200)]
Before = Annotated[int | None, Query(ge=0, lt=2**63, description="`next` of the page before")]


def router(service: Service) -> APIRouter:
    """The routes over a service."""
    routes = APIRouter(tags=["cluster"])
    watching = Watching(service)
    service.closers.append(watching.close)

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> HTMLResponse:
        """The page; what it shows it asks for with its reader's token."""
        return HTMLResponse(page(), headers=HEADERS)

    @routes.get("/metrics", response_class=PlainTextResponse, tags=["metrics"])
    async def metrics(caller: Scraper) -> PlainTextResponse:
        """All figures, for Prometheus. Takes a token of the scope `scrape` or `admin`."""
        text = await service.read(exposition, service, watching.num_listeners)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/stream")
    async def stream(caller: Reader, mine: Mine = False) -> StreamingResponse:
        """Server-sent events with all that the page draws: each part at once, and when it changes.

        The events are `cluster`, `groups`, `jobs`, `timeline`, `figures` and `decisions`, with what
        the routes of these names answer. A client that connects anew is told all of it again.
        """
        viewer = viewer_of(caller, mine=mine)
        watching.check_room(viewer)
        events = watching.listen(viewer, caller.token)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

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
        """A job's loss over its steps, thinned to a number of points."""
        try:
            row = await service.read(service.store.jobs.get, job)
        except NotFound:
            raise missing("a job's id", job) from None
        if not viewer_of(caller).may_see(row):
            raise missing("a job's id", job)
        found = await service.read(read_curve, service.home.job(row.id) / METRICS_FILE, points)
        return {"job": row.id, "points": found}


def viewer_of(caller: Caller, *, mine: bool = False) -> Viewer:
    """The view of a caller: an admin sees all, unless it wants to look as its tenant does."""
    return Viewer(tenant=caller.tenant, sees_all=caller.is_admin and not mine)
