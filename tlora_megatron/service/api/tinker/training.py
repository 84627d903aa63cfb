"""Takes passes and steps, and answers them when they are done."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request, Response

from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.service.api.gate import Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.bodies import OutOfRoom, Refused, TinkerRoute
from tlora_megatron.service.api.tinker.context import Content, TenantContext, Waiting, respond
from tlora_megatron.service.api.tinker.names import ModelId, RequestId
from tlora_megatron.service.api.tinker.protobuf import decode_pass
from tlora_megatron.service.api.tinker.sampling import SamplingTasks
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import Model, OverLimit
from tlora_megatron.training import driven_requests

POLL_S = 20.0
"""A client that waits for an answer is sent `try_again` after so long; it gives up at 45."""
LOOK_S = 1.0
"""So often the store is asked what became of a model's job."""
AT_ONCE = 8
"""Passes of a tenant that are held in memory; what comes besides waits in its connection."""
MOST_AHEAD = 1000
"""Requests of a model that may wait."""
MOST_WAITING_BYTES = 2 << 30
"""Bytes of all waiting requests together, beside those that are not large."""
LARGE_BYTES = 1 << 20


def router(service: Service, tasks: SamplingTasks) -> APIRouter:
    """The routes of passes, steps and futures."""
    routes = APIRouter(route_class=TinkerRoute)
    turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @routes.post("/forward_backward")
    async def forward_backward(request: Request, caller: Submitter) -> dict[str, Any]:
        context, encoding = (
            TenantContext(service, caller.tenant),
            request.headers.get("content-encoding"),
        )
        async with turns.setdefault(caller.tenant, asyncio.Semaphore(AT_ONCE)):
            return await service.read(_take_pass, context, await request.body(), encoding)

    @routes.post("/optim_step")
    async def optim_step(body: bodies.OptimStep, caller: Submitter) -> dict[str, Any]:
        if body.optimizer_params is not None or body.adam_params is None:
            family = (body.optimizer_params or {}).get("type", "none")
            raise Refused(f"optim_params must be AdamParams here, got those of {family!r:.80}")
        step = driven_requests.Request(op="optim_step", params=dict(body.adam_params))
        context = TenantContext(service, caller.tenant)
        return await service.read(submit, context, body.model_id, body.seq_id, "optim_step", step)

    @routes.post("/retrieve_future")
    async def retrieve(body: bodies.RetrieveFuture, caller: Reader) -> Response:
        context = TenantContext(service, caller.tenant)
        request = RequestId.parse(body.request_id)
        if isinstance(request.of, ModelId):
            return respond(await wait_for(context, request), body.request_id)
        return respond(await tasks.wait_for(context, request, POLL_S), body.request_id)

    return routes


def submit(
    context: TenantContext, model_id: str, seq_id: int, op: str, request: driven_requests.Request
) -> dict[str, Any]:
    """Writes a request into the log of a model's job; the same number again changes nothing.

    Args:
        op: Tinker's name of the request, which says what its answer is like.

    Raises:
        UnknownId, Gone: if the model is not there.
        RequestError: if the request cannot be carried out.
        OutOfRoom: if the tenant has no room for what it sends; steps and saves always have.
    """
    model = context.open_model(model_id)
    log, number = context.request_log(model), model.log_number(seq_id)
    if number > MOST_AHEAD and log.state(number - MOST_AHEAD) in ("unknown", "waiting"):
        raise ApiError(
            429, f"seq_id must be at most {MOST_AHEAD} ahead of the answers, got {seq_id}"
        )
    size = sum(array.nbytes for array in request.arrays.values())
    if size and log.state(number) == "unknown":
        _check_room(log, size)
        try:
            context.service.quota.check(context.tenant, size)
        except OverLimit as error:
            raise OutOfRoom(str(error)) from error
    if log.write_request(number, request):
        context.service.quota.note(context.tenant, size)
    return {"request_id": str(RequestId(ModelId.of(model), seq_id, op)), "model_id": model.id}


def _check_room(log: RequestLog, size: int) -> None:
    """Refuses a large request of a model of which too much waits: all tenants share the disk."""
    if size > LARGE_BYTES and log.waiting_bytes() > MOST_WAITING_BYTES:
        rule = f"have at most {MOST_WAITING_BYTES:,} bytes of requests without an answer"
        raise ApiError(429, f"a model must {rule}, got more: wait for some")


def _take_pass(context: TenantContext, body: bytes, encoding: str | None) -> dict[str, Any]:
    taken = decode_pass(body, encoding)
    if not 1 <= taken.seq_id < 10**9:
        raise Refused(f"seq_id must be from 1, got {taken.seq_id}")
    return submit(context, taken.model_id, taken.seq_id, taken.request.op, taken.request)


async def wait_for(context: TenantContext, request: RequestId) -> Content | Waiting:
    """The answer to a model's request; if there is none within `POLL_S`, why not."""
    read = context.service.read
    model = await read(context.futures.model_of, request)
    end_s = time.monotonic() + POLL_S
    while True:
        found = await read(context.futures.look, request, model)
        if not isinstance(found, Waiting):
            return _outward(context, found)
        if time.monotonic() >= end_s:
            return found
        await _until_answered(context, request, model, min(end_s, time.monotonic() + LOOK_S))


async def _until_answered(
    context: TenantContext, request: RequestId, model: Model, end_s: float
) -> None:
    """Returns when an answer is on the disk, or the time has come."""
    pause_s = 0.002
    while time.monotonic() < end_s and not context.futures.is_answered(request, model):
        await asyncio.sleep(pause_s)
        pause_s = min(0.025, pause_s * 1.3)


def _outward(context: TenantContext, found: Content) -> Content:
    """A result whose error names no path of the service's host."""
    if isinstance(found, bytes) or "error" not in found:
        return found
    return {**found, "error": context.service.outward(str(found["error"]), context.tenant)}
