"""Lets models leave when their client says so or is silent, and deletes what has had its time."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from contextlib import suppress
from weakref import WeakValueDictionary

from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.checkpoints import KEPT_FOR_SAMPLERS
from tlora_megatron.service.api.tinker.context import TenantContext
from tlora_megatron.service.api.tinker.sampling import sweep_samples
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import IllegalChange, Model, Session, StoreError
from tlora_megatron.training.driven.requests import Op, Request

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
    """Writes a model's last requests, once; `last_request` is then the number of the very last.

    Args:
        context: Of the model's tenant.
        model: The model.
        keep: Saves its state before, if it was asked for anything.
    """
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
    request = Request(op=op, params=params)
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
    """Looks after the sessions of all tenants, in a task of its own.

    Args:
        service: of which the sessions are.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._since = self._flushed_at = self._now()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look."""
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
            except Exception:
                logger.exception("sessions could not be looked after")

    async def look(self) -> None:
        """Looks once, at the sessions of all tenants."""
        if self._now() >= self._flushed_at + FLUSH_S:
            await self._flush()
        for session in await self._service.read(self._service.store.sessions.all):
            try:
                await self._look_at(TenantContext(self._service, session.tenant), session)
            except Exception:  # others' sessions end all the same
                logger.exception("session %s could not be looked after", session.id)

    async def _flush(self) -> None:
        """Writes heartbeats; a full disk keeps them in memory, and expired files are deleted."""
        self._flushed_at = self._now()
        try:
            await self._service.read(self._service.store.sessions.flush)
        except StoreError:
            logger.exception("heartbeats could not be written")

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
    """Deletes what has had its time; returns models that ought to have left.

    A process may have died before they had.
    """
    models = context.sessions.models(tenant=context.tenant, session=session.id)
    jobs = context.service.store.jobs.many([model.job for model in models])
    over = {job.id for job in jobs if job.state.is_over}
    keep = 0 if session.ended else KEPT_FOR_SAMPLERS
    for model in models:
        is_over = model.job in over
        context.checkpoints.sweep(model, context.service.in_use, keep=keep, is_over=is_over)
    sweep_samples(context.samples(session.id), time.time() - SAMPLES_S)
    return [model for model in models if session.ended is not None and model.last_request is None]
