"""Takes passes and steps, and answers them when they are done."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tlora_megatron.service.api.access.gate import Reader, Submitter
from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.drawing import Drawing
from tlora_megatron.service.api.tinker.errors import TinkerRoute
from tlora_megatron.service.api.tinker.refusals import OutOfRoom, Refused
from tlora_megatron.service.api.tinker.state.futures import Content, Waiting
from tlora_megatron.service.api.tinker.state.names import ModelId, RequestId
from tlora_megatron.service.api.tinker.state.sessions import Model
from tlora_megatron.service.api.tinker.wire import bodies
from tlora_megatron.service.api.tinker.wire.decoding import decode_pass
from tlora_megatron.service.api.tinker.wire.encoding import MEDIA_TYPE
from tlora_megatron.service.request_log import RequestLog as Journal
from tlora_megatron.service.store import OverLimit
from tlora_megatron.training.driven import requests

POLL_S = 20.0
"""A client that waits for an answer is told after so long that there is none; it gives up at 45."""
LOOK_S = 1.0
"""So often the store is asked what became of a model's job."""
AT_ONCE = 8
"""Passes of a tenant that are held in memory; what comes besides waits in its connection."""
MOST_AHEAD = 1000
"""Requests of a model that may wait."""
MOST_WAITING_BYTES = 2 << 30
"""Bytes of all waiting requests together, beside those that are not large."""
LARGE_BYTES = 1 << 20


def router(service: Service, drawing: Drawing) -> APIRouter:
    """The routes of passes, steps and futures."""
    routes = APIRouter(route_class=TinkerRoute)
    turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @routes.post("/forward_backward")
    async def forward_backward(request: Request, caller: Submitter) -> dict[str, Any]:
        desk, encoding = Desk.of(service, caller.tenant), request.headers.get("content-encoding")
        async with turns.setdefault(caller.tenant, asyncio.Semaphore(AT_ONCE)):
            return await service.read(_take_pass, desk, await request.body(), encoding)

    @routes.post("/optim_step")
    async def optim_step(body: bodies.OptimStep, caller: Submitter) -> dict[str, Any]:
        if body.optimizer_params is not None or body.adam_params is None:
            family = (body.optimizer_params or {}).get("type", "none")
            raise Refused(f"optim_params must be AdamParams here, got those of {family!r:.80}")
        step = requests.Request(op="optim_step", params=dict(body.adam_params))
        desk = Desk.of(service, caller.tenant)
        return await service.read(submit, desk, body.model_id, body.seq_id, "optim_step", step)

    @routes.post("/retrieve_future")
    async def retrieve(body: bodies.RetrieveFuture, caller: Reader) -> Response:
        desk = Desk.of(service, caller.tenant)
        request = RequestId.parse(body.request_id)
        if isinstance(request.of, ModelId):
            return respond(await wait_for(desk, request), body.request_id)
        return respond(await drawing.wait_for(desk, request, POLL_S), body.request_id)

    return routes


def submit(
    desk: Desk, model_id: str, seq_id: int, op: str, request: requests.Request
) -> dict[str, Any]:
    """Writes a request into a model's journal; the same number again changes nothing.

    Args:
        op: Tinker's name of the request, which says how its answer is told.

    Raises:
        UnknownId, Gone: if the model is not there.
        RequestError: if the request cannot be carried out.
        OutOfRoom: if the tenant has no room for what it sends; steps and saves always have.
    """
    model = desk.open_model(model_id)
    journal, number = desk.journal(model), model.number(seq_id)
    if number > MOST_AHEAD and journal.state(number - MOST_AHEAD) in ("unknown", "waiting"):
        raise ApiError(
            429, f"seq_id must be at most {MOST_AHEAD} ahead of the answers, got {seq_id}"
        )
    size = sum(array.nbytes for array in request.arrays.values())
    if size and journal.state(number) == "unknown":
        _check_room(journal, size)
        _check_quota(desk, size)
    if journal.write_request(number, request):
        desk.service.quota.note(desk.tenant, size)
    return {"request_id": str(RequestId(model.model_id, seq_id, op)), "model_id": model.id}


def _check_room(journal: Journal, size: int) -> None:
    """Refuses a large request of a model of which too much waits: all tenants share the disk."""
    if size > LARGE_BYTES and journal.waiting_bytes() > MOST_WAITING_BYTES:
        rule = f"have at most {MOST_WAITING_BYTES:,} bytes of requests without an answer"
        raise ApiError(429, f"a model must {rule}, got more: wait for some")


def _check_quota(desk: Desk, size: int) -> None:
    try:
        desk.service.quota.check(desk.tenant, size)
    except OverLimit as error:
        raise OutOfRoom(str(error)) from error


def _take_pass(desk: Desk, body: bytes, encoding: str | None) -> dict[str, Any]:
    taken = decode_pass(body, encoding)
    if not 1 <= taken.seq_id < 10**9:
        raise Refused(f"seq_id must be from 1, got {taken.seq_id}")
    return submit(desk, taken.model_id, taken.seq_id, taken.request.op, taken.request)


async def wait_for(desk: Desk, request: RequestId) -> Content | Waiting:
    """The answer to a model's request; if there is none within `POLL_S`, why not."""
    read = desk.service.read
    model = await read(desk.futures.model_of, request)
    end_s = time.monotonic() + POLL_S
    while True:
        found = await read(desk.futures.look, request, model)
        if not isinstance(found, Waiting):
            return _outward(desk, found)
        if time.monotonic() >= end_s:
            return found
        await _until_answered(desk, request, model, min(end_s, time.monotonic() + LOOK_S))


async def _until_answered(desk: Desk, request: RequestId, model: Model, end_s: float) -> None:
    """Returns when an answer is on the disk, or the time has come."""
    pause_s = 0.002
    while time.monotonic() < end_s and not desk.futures.is_answered(request, model):
        await asyncio.sleep(pause_s)
        pause_s = min(0.025, pause_s * 1.3)


def _outward(desk: Desk, found: Content) -> Content:
    """A result whose error names no path of the service's host."""
    if isinstance(found, bytes) or "error" not in found:
        return found
    return {**found, "error": desk.service.outward(str(found["error"]), desk.tenant)}


def respond(found: Content | Waiting, request_id: str) -> Response:
    """The response with a result, or with the news that there is none yet."""
    if isinstance(found, Waiting):
        return JSONResponse(found.content(request_id))
    if isinstance(found, bytes):
        return Response(found, media_type=MEDIA_TYPE)
    return JSONResponse(dict(found))
