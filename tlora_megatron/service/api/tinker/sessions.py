"""How a client starts, stays and ends, and how its models leave when it is silent."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request

from tlora_megatron.service.api.gate import Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.checkpoints import KEPT_FOR_SAMPLERS
from tlora_megatron.service.api.tinker.context import (
    Reading,
    Submitting,
    TenantContext,
    positions_of,
)
from tlora_megatron.service.api.tinker.names import TinkerRoute, new_session
from tlora_megatron.service.api.tinker.sampling import sweep_samples
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import IllegalChange, Model, Session, StoreError
from tlora_megatron.training.driven_requests import Op
from tlora_megatron.training.driven_requests import Request as JobRequest

logger = logging.getLogger(__name__)

KEPT_AS = "left"
"""Begins the name of the checkpoint that a model leaves behind."""
SILENCE_S = 300.0
"""Seconds without a heartbeat after which a client counts as gone; the SDK sends one every 10 s."""
LOOK_S = 15.0
"""So often the reaper looks."""
FLUSH_S = 30.0
"""So often heartbeats are written, those of all clients together."""
SAMPLES_S = 3600.0
"""Answers of samplers are kept so long."""
_LEAVING: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""A model's last requests are written by one at a time: its client, or the reaper."""


async def end_session(context: TenantContext, session_id: str, why: str) -> None:
    """Takes no more of a session; its models are saved and leave. May be called again."""
    service, sessions = context.service, context.sessions
    await service.change(lambda: sessions.end(session_id, why))
    for model in await service.read(sessions.models, tenant=context.tenant, session=session_id):
        await leave(context, model, keep=True)


async def leave(context: TenantContext, model: Model, *, keep: bool) -> Model:
    """Writes a model's last requests, once; `keep` saves its state if it was used."""
    async with _LEAVING.setdefault(model.id, asyncio.Lock()):
        return await context.service.read(_leave, context, model.id, keep=keep)


def _leave(context: TenantContext, model_id: str, *, keep: bool) -> Model:
    model = context.model(model_id)
    if model.last_request is not None:
        return model
    number = _write_last(context, model, keep=keep)
    if not number:
        with suppress(IllegalChange):
            context.service.store.jobs.request_action(model.job, "cancel", by="its client has gone")
    return context.sessions.leave(model, number)


def _write_last(context: TenantContext, model: Model, *, keep: bool) -> int:
    """Writes a model's last requests; returns the last one's number, 0 = its job may just end."""
    log, job = context.request_log(model), context.service.store.jobs.get(model.job)
    number = _free_number(log)
    if keep and (job.state.is_over or (number == 1 and job.started_at is None)):
        return 0
    if keep and number > 1:
        _write(log, "save_state", name=f"{KEPT_AS}-{number}", overwrite=True)
    return _write(log, "leave")


def _write(log: RequestLog, op: Op, **params: object) -> int:
    """Writes a request behind those that the job can carry out; returns its number."""
    request = JobRequest(op=op, params=params)
    while not log.write_request(number := _free_number(log), request):
        pass
    return number


def _free_number(log: RequestLog) -> int:
    """The number for which the job would wait; requests behind it may lie there for ever."""
    number = log.covered() + 1
    while log.state(number) != "unknown":
        number += 1
    return number


def forget_session(context: TenantContext, session_id: str) -> None:
    """Deletes a session that has ended, with all requests and answers of its models.

    As long as a model has a checkpoint, its session stays, so that the checkpoint can be listed,
    loaded and sampled from; as long as its job has not left, its requests do.
    """
    is_needed = False
    for model in context.sessions.models(tenant=context.tenant, session=session_id):
        if not context.service.store.jobs.get(model.job).state.is_over:
            is_needed = True
            continue
        context.request_log(model).forget()
        is_needed |= context.checkpoints.has_any(model)
    if not is_needed:
        # Files first: after a kill between the two the session is found again.
        shutil.rmtree(context.samples(session_id).parent, ignore_errors=True)
        context.sessions.remove(session_id)


class Reaper:
    """Looks after the sessions of all tenants, in a task of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._since = self._flushed_at = self._now()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._since = self._now()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Looks no more, and writes the heartbeats of the last seconds."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._flush()

    def _now(self) -> float:
        return self._service.store.database.clock()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (StoreError, OSError) as error:
                logger.warning("sessions are looked after later: %s", error)
            except Exception:
                logger.exception("sessions could not be looked after")

    async def look(self) -> None:
        """Looks once, at the sessions of all tenants."""
        if self._now() >= self._flushed_at + FLUSH_S:
            await self._flush()
        for session in await self._service.read(self._service.store.sessions.all):
            try:
                await self._look_at(TenantContext(self._service, session.tenant), session)
            except StoreError:
                raise
            except Exception:  # others' sessions end all the same
                logger.exception("session %s could not be looked after", session.id)

    async def _flush(self) -> None:
        """Writes heartbeats; a full disk keeps them in memory, and expired files are deleted."""
        self._flushed_at = self._now()
        try:
            await self._service.read(self._service.store.sessions.flush)
        except StoreError as error:
            logger.warning("heartbeats are written later: %s", error)

    async def _look_at(self, context: TenantContext, session: Session) -> None:
        now = self._now()
        # Heartbeats that came while the service was away were lost.
        silent_s = now - max(context.sessions.heard_at(session), self._since)
        if session.ended is None and silent_s > SILENCE_S:
            why = f"its client was not heard of for {SILENCE_S:.0f} s"
            logger.info("session %s of %s ends: %s", session.id, context.tenant, why)
            await end_session(context, session.id, why)
        for model in await self._service.read(_sweep, context, session):
            await leave(context, model, keep=True)
        keep_s = self._service.keep_sessions_s
        if session.ended_at is not None and now - session.ended_at > keep_s:
            await self._service.read(forget_session, context, session.id)


def _sweep(context: TenantContext, session: Session) -> list[Model]:
    """Deletes what has had its time; returns models that ought to have left before."""
    models = context.sessions.models(tenant=context.tenant, session=session.id)
    jobs = context.service.store.jobs.many([model.job for model in models])
    over = {job.id for job in jobs if job.state.is_over}
    keep = 0 if session.ended else KEPT_FOR_SAMPLERS
    for model in models:
        context.checkpoints.sweep(model, keep=keep, is_over=model.job in over)
    sweep_samples(context.samples(session.id), time.time() - SAMPLES_S)
    return [model for model in models if session.ended is not None and model.last_request is None]


TESTED = ((0, 25), (0, 38))
"""Versions of the SDK, the first and the last, whose tests are run."""
_OF_PROXIES = frozenset({"x-forwarded-for", "x-forwarded-proto", "forwarded", "x-real-ip", "via"})
DEVIATIONS = (
    "This is tLoRA, not Tinker: the unembedding has no adapter (train_unembed has no effect); "
    "alpha is 32 (user_metadata={'tlora.lora.alpha': '16'} changes it). docs/tinker.md lists what "
    "else differs."
)


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=TinkerRoute)

    @routes.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.post("/client/config")
    async def config(caller: Reader, request: Request) -> dict[str, Any]:
        # A network is slower than zstd, the loopback interface is not.
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": not is_local(request)}

    @routes.post("/client/dynamic_config")
    async def dynamic_config(caller: Reader) -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @routes.post("/create_session")
    async def create(body: bodies.CreateSession, caller: Submitter) -> dict[str, Any]:
        metadata = {key: str(value) for key, value in (body.user_metadata or {}).items()}
        now = service.store.database.clock()
        session = Session(
            id=new_session(),
            tenant=caller.tenant,
            created_at=now,
            sdk_version=body.sdk_version,
            display_name=body.display_name,
            user_metadata=metadata or None,
            heard_at=now,
        )
        await service.change(lambda: service.store.sessions.add(session))
        return {
            "type": "create_session",
            "session_id": session.id,
            "info_message": DEVIATIONS,
            "warning_message": _warning(body.sdk_version),
        }

    @routes.post("/session_heartbeat")
    async def heartbeat(session_id: bodies.Word, context: Submitting) -> dict[str, str]:
        session = await service.read(context.open_session, session_id)
        context.sessions.hear(session.id)
        return {"type": "session_heartbeat"}

    @routes.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, context: Submitting) -> None:
        await service.read(context.session, session_id)
        await end_session(context, session_id, "its client has finished")

    @routes.post("/telemetry")
    async def telemetry(caller: Submitter) -> dict[str, str]:
        return {"status": "accepted"}  # it is not kept

    @routes.get("/get_server_capabilities")
    async def capabilities(caller: Reader) -> dict[str, Any]:
        return {"supported_models": await service.read(_models, service)}

    @routes.get("/sessions")
    async def listed(caller: Reader, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        found = await service.read(service.store.sessions.all, caller.tenant)
        begin, end = max(0, offset), max(0, offset) + min(max(0, limit), 1000)
        return {"sessions": [session.id for session in found[begin:end]]}

    @routes.get("/sessions/{session_id}")
    async def get(session_id: str, context: Reading) -> dict[str, Any]:
        sessions = context.sessions
        session = await service.read(context.session, session_id)
        models = await service.read(sessions.models, tenant=context.tenant, session=session_id)
        samplers = await service.read(sessions.samplers, session_id)
        return {
            "training_run_ids": [model.id for model in models],
            "sampler_ids": [sampler.id for sampler in samplers],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    return routes


def is_local(request: Request) -> bool:
    """True if the client is on the service's host, and no proxy is between."""
    host = None if request.client is None else request.client.host
    return host in ("127.0.0.1", "::1") and _OF_PROXIES.isdisjoint(request.headers.keys())


def _warning(version: str) -> str | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    least, most = TESTED
    if found is not None and least <= (int(found[1]), int(found[2])) <= most:
        return None
    spoken = " to ".join(".".join(map(str, end)) for end in TESTED)
    return f"the tinker SDK must be of version {spoken} to be tested here, got {version}"


def _models(service: Service) -> list[dict[str, Any]]:
    return [
        {
            "model_name": name,
            "max_context_length": positions_of(base),
            "trainable": True,
            "sampleable": service.sampler is not None,
            "dtype": base.dtype,
        }
        for name, base in service.bases().items()
    ]
