"""`/v1/jobs/{job}/events` and `/metrics`: what happens to a job, as it happens, and its numbers."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from tlora_megatron.service.api.errors import refused
from tlora_megatron.service.api.gate import Reader
from tlora_megatron.service.api.native.following import Following, Listener
from tlora_megatron.service.api.native.jobs import shown_event, visible_job
from tlora_megatron.service.api.native.wire import answers
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.history import Place
from tlora_megatron.training.metrics import METRICS_FILE

_MOST_BYTES = 8 << 20
_LINE_BYTES = 512
"""A guess; lines that are longer are read by a second look."""


def router(service: Service) -> APIRouter:
    """The routes of a job's history."""
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
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @routes.get("/metrics", responses=answers(404))
    async def metrics(
        job: str,
        caller: Reader,
        tail: Annotated[int, Query(ge=1, le=10_000, description="how many lines")] = 100,
    ) -> dict[str, Any]:
        """The last lines of a job's numbers: a row a step or evaluation."""
        found = await service.read(visible_job, service, job, caller)
        path = service.home.job(found.id) / METRICS_FILE
        return {"rows": await service.read(last_rows, path, tail)}

    return routes


def _place(text: str | None) -> Place:
    try:
        return Place() if text is None else Place.read(text)
    except ValueError:
        raise refused("Last-Event-ID", "be the id of an event of this stream", text) from None


def last_rows(path: Path, count: int) -> list[Any]:
    """The last whole lines of a file of JSON lines, as values; the file may grow meanwhile."""
    size = _LINE_BYTES * count
    while True:
        content, is_all = _end_of(path, size)
        lines = content[: content.rfind(b"\n") + 1].splitlines()
        lines = lines if is_all else lines[1:]
        if is_all or len(lines) >= count or size >= _MOST_BYTES:
            return [json.loads(line) for line in lines[-count:]]
        size *= 4


def _end_of(path: Path, size: int) -> tuple[bytes, bool]:
    try:
        with path.open("rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - size)
            file.seek(begin)
            return file.read(size), begin == 0
    except FileNotFoundError:
        return b"", True
