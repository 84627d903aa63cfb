"""Takes passes and steps, answers them when they are done, and saves and loads weights."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request, Response

from tlora_megatron.files import read_json
from tlora_megatron.service.api.gate import ApiError, Caller, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.checkpoints import (
    EPHEMERAL,
    EXTERNAL,
    INFLIGHT,
    Saved,
    check_ttl,
    folder_name,
)
from tlora_megatron.service.api.tinker.context import (
    SAVE_FOR_SESSION,
    Content,
    Reading,
    Submitting,
    TenantContext,
    Waiting,
    positions_of,
    respond,
)
from tlora_megatron.service.api.tinker.models import check_optimizer, loaded_document, submit_model
from tlora_megatron.service.api.tinker.names import (
    Kind,
    ModelId,
    OutOfRoom,
    Refused,
    RequestId,
    SamplerId,
    TinkerPath,
    TinkerRoute,
)
from tlora_megatron.service.api.tinker.protobuf import decode_pass
from tlora_megatron.service.api.tinker.recorded import with_recorded, with_steps
from tlora_megatron.service.api.tinker.sampling import SamplingTasks
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import Model, OverLimit
from tlora_megatron.training import driven_requests
from tlora_megatron.training.saving.writer import AdapterVersion

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
    routes = APIRouter(route_class=TinkerRoute)
    turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @routes.post("/forward_backward")
    async def forward_backward(request: Request, context: Submitting) -> dict[str, Any]:
        encoding = request.headers.get("content-encoding")
        async with turns.setdefault(context.tenant, asyncio.Semaphore(AT_ONCE)):
            return await service.read(_take_pass, context, await request.body(), encoding)

    @routes.post("/optim_step")
    async def optim_step(body: bodies.OptimStep, context: Submitting) -> dict[str, Any]:
        if body.optimizer_params is not None or body.adam_params is None:
            family = (body.optimizer_params or {}).get("type", "none")
            raise Refused(f"optim_params must be AdamParams here, got those of {family!r:.80}")
        step = driven_requests.Request(op="optim_step", params=dict(body.adam_params))
        return await service.read(submit, context, body.model_id, body.seq_id, "optim_step", step)

    @routes.post("/retrieve_future")
    async def retrieve(request_id: bodies.Word, context: Reading) -> Response:
        request = RequestId.parse(request_id)
        if isinstance(request.of, ModelId):
            return respond(await wait_for(context, request), request_id)
        return respond(await tasks.wait_for(context, request, POLL_S), request_id)

    return routes


def submit(
    context: TenantContext, model_id: str, seq_id: int, op: str, request: driven_requests.Request
) -> dict[str, Any]:
    """Writes a request into the log of a model's job; the same number again changes nothing.

    Args:
        op: Tinker's name of the request, which says what its answer is like.

    Raises:
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
    request = taken.request
    if request.loss_fn == "stable_reinforce":
        request = with_recorded(context, taken)
    request = with_steps(context, taken, request)
    return submit(context, taken.model_id, taken.seq_id, request.op, request)


async def wait_for(context: TenantContext, request: RequestId) -> Content | Waiting:
    """The answer to a model's request; if there is none within `POLL_S`, why not."""
    read = context.service.read
    model = await read(context.model_of, request)
    end_s = time.monotonic() + POLL_S
    while True:
        found = await read(context.look, request, model)
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
    while time.monotonic() < end_s and not context.is_answered(request, model):
        await asyncio.sleep(pause_s)
        pause_s = min(0.025, pause_s * 1.3)


def _outward(context: TenantContext, found: Content) -> Content:
    """A result whose error names no path of the service's host."""
    if isinstance(found, bytes) or "error" not in found:
        return found
    return {**found, "error": context.service.outward(str(found["error"]), context.tenant)}


_STATE = "state.json"
_SAVES: dict[Kind, str] = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""Kind of a checkpoint -> Tinker's name of the request that saves it."""


def weights_router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=TinkerRoute)

    @routes.post("/save_weights")
    async def save(body: bodies.SaveWeights, context: Submitting) -> dict[str, Any]:
        return await service.read(_save, context, body, "weights")

    @routes.post("/save_weights_for_sampler")
    async def save_for_sampler(body: bodies.SaveWeights, context: Submitting) -> dict[str, Any]:
        if body.path is None:
            return await service.read(_save_for_session, context, body)
        return await service.read(_save, context, body, "sampler_weights")

    @routes.post("/save_weights_external")
    async def save_external(body: bodies.SaveWeights, context: Submitting) -> dict[str, Any]:
        if body.age_encryption_recipients:
            raise Refused("age_encryption_recipients must be left out: nothing is encrypted here")
        return await service.read(_save, context, body, "external_weights")

    @routes.post("/load_weights")
    async def load(
        body: bodies.LoadWeights, caller: Submitter, context: Submitting
    ) -> dict[str, Any]:
        check_optimizer(body.optimizer_config)
        if body.session_id is not None and body.model_seq_id is not None:
            return await _create_from(context, caller, body)
        return await service.read(_load, context, body)

    @routes.post("/weights_info")
    async def info(tinker_path: bodies.Word, context: Reading) -> dict[str, Any]:
        saved = await service.read(context.checkpoints.find, tinker_path)
        model = await service.read(context.model, saved.note.model)
        return {
            "base_model": model.base,
            "is_lora": True,
            "lora_rank": model.rank,
            "train_unembed": model.train_unembed,
            "train_mlp": model.train_mlp,
            "train_attn": model.train_attn,
        }

    return routes


def _save(context: TenantContext, body: bodies.SaveWeights, kind: Kind) -> dict[str, Any]:
    name = body.path or f"{body.seq_id:06d}"
    for reserved in (EPHEMERAL, EXTERNAL):
        if name.startswith(reserved):
            raise Refused(f"path must not begin with {reserved!r}, got {name!r}")
    if body.ttl_seconds is not None:
        check_ttl(body.ttl_seconds)  # before anything is saved
    is_state = kind == "weights"
    overwrite = body.overwrite if is_state else True
    params = {"name": folder_name(kind, name), "overwrite": overwrite}
    request = driven_requests.Request(
        op="save_state" if is_state else "save_for_sampler", params=params
    )
    answer = submit(context, body.model_id, body.seq_id, _SAVES[kind], request)
    path = TinkerPath(ModelId.parse(body.model_id), kind, name)
    context.checkpoints.note(path, body.user_metadata, body.ttl_seconds)
    return answer


def _save_for_session(context: TenantContext, body: bodies.SaveWeights) -> dict[str, Any]:
    """Saves weights for a sampler of their own, which the answer names."""
    if body.sampling_session_seq_id is None:
        raise Refused("path or sampling_session_seq_id must be given, got neither")
    model = context.open_model(body.model_id)
    kind = INFLIGHT if body.kind == "inflight" else ""
    name = f"{EPHEMERAL}{body.sampling_session_seq_id}{kind}"
    path = TinkerPath(ModelId.of(model), "sampler_weights", name)
    version = AdapterVersion(model.job, model.log_number(body.seq_id))
    id = SamplerId(model.session, body.sampling_session_seq_id)
    context.sessions.put_sampler(context.new_sampler(id, model.base, str(path), str(version)))
    request = driven_requests.Request(
        op="save_for_sampler", params={"name": name, "overwrite": True, "only_sampled": True}
    )
    return submit(context, body.model_id, body.seq_id, SAVE_FOR_SESSION, request)


def _load(context: TenantContext, body: bodies.LoadWeights) -> dict[str, Any]:
    """Loads a state into a model that is there."""
    if body.model_id is None or body.seq_id is None:
        raise Refused("model_id and seq_id, or session_id and model_seq_id must be given")
    model, saved = context.open_model(body.model_id), _loadable(context, body.path)
    _check_base(context, model.base, saved)
    return submit(
        context, model.id, body.seq_id, "load_weights", _load_request(context, saved, body)
    )


async def _create_from(
    context: TenantContext, caller: Caller, body: bodies.LoadWeights
) -> dict[str, Any]:
    """Makes a model whose first request is to load a state."""
    read = context.service.read
    await read(context.open_session, str(body.session_id))
    model_id = ModelId(str(body.session_id), int(body.model_seq_id or 0))
    if not await read(_is_begun, context, model_id):
        model, document, load = await read(_draft, context, model_id, body)
        made = await submit_model(context, caller, model, document)
        await read(context.request_log(made).write_request, 1, load)
    return {"request_id": str(RequestId(model_id, 0, "load_weights")), "model_id": str(model_id)}


def _is_begun(context: TenantContext, model_id: ModelId) -> bool:
    """True if a model is there and has its first request: a kill may come between the two."""
    known = context.sessions.model(str(model_id), tenant=context.tenant)
    return known is not None and context.request_log(known).state(1) != "unknown"


def _draft(
    context: TenantContext, model_id: ModelId, body: bodies.LoadWeights
) -> tuple[Model, dict[str, Any], driven_requests.Request]:
    saved = _loadable(context, body.path)
    first = context.model(saved.note.model)
    metadata = {key: str(value) for key, value in (body.user_metadata or {}).items()}
    model = context.new_model(
        model_id,
        base=body.base_model or first.base,
        rank=first.rank,
        train_attn=first.train_attn,
        train_mlp=first.train_mlp,
        train_unembed=first.train_unembed,
        user_metadata=metadata or None,
        loaded_from=body.path,
    )
    _check_base(context, model.base, saved)
    state = read_json(saved.folder / _STATE)
    document = loaded_document(model, state, positions_of(context.base(model.base)))
    return model, document, _load_request(context, saved, body)


def _loadable(context: TenantContext, path: str) -> Saved:
    saved = context.checkpoints.find(path)
    if saved.path.kind != "weights":
        raise Refused(f"path must be of weights to train on, saved by save_state, got {path!r}")
    return saved


def _check_base(context: TenantContext, base: str, saved: Saved) -> None:
    """Refuses the weights of one base for another."""
    other = context.model(saved.note.model).base
    if base != other and context.base(base) != context.base(other):
        raise Refused(f"base_model must be {other!r}, of which {saved.path} is, got {base!r}")


def _load_request(
    context: TenantContext, saved: Saved, body: bodies.LoadWeights
) -> driven_requests.Request:
    params = {"path": context.checkpoints.place(saved), "optimizer": body.optimizer}
    return driven_requests.Request(op="load_state", params=params)
