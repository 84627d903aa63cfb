"""Ends sessions whose clients are not heard of any more, and deletes what has had its time."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.endings import end_session, forget_session, leave
from tlora_megatron.service.api.tinker.state.samples import sweep_samples
from tlora_megatron.service.api.tinker.state.sessions import SILENCE_S, Model, Session
from tlora_megatron.service.api.tinker.state.sweep import KEPT_FOR_SAMPLERS, sweep

logger = logging.getLogger(__name__)

LOOK_S = 15.0
"""So often it looks."""
SAMPLES_S = 3600.0
"""Answers of samplers are kept so long."""


class Reaper:
    """Looks after the sessions of all tenants, in a task of its own.

    Args:
        service: of which the sessions are.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._since = time.time()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look."""
        self._since = time.time()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Looks no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:
                logger.exception("sessions could not be looked after")

    async def look(self) -> None:
        """Looks once, at all tenants."""
        read, tenants = self._service.read, self._service.home.tenants
        for tenant in sorted(os.listdir(tenants)) if tenants.is_dir() else ():
            desk = Desk.of(self._service, tenant)
            await read(desk.sessions.finish_removals)
            for session in await read(desk.sessions.all):
                try:
                    await self._look_at(desk, session)
                except Exception:  # others' sessions end all the same
                    logger.exception("session %s could not be looked after", session.id)

    async def _look_at(self, desk: Desk, session: Session) -> None:
        # A service that was not there has heard nobody.
        silence_s = min(desk.sessions.silence(session.id), time.time() - self._since)
        if session.ended is None and silence_s > SILENCE_S:
            why = f"its client was not heard of for {SILENCE_S:.0f} s"
            logger.info("session %s of %s ends: %s", session.id, desk.tenant, why)
            await end_session(desk, session.id, why)
        for model in await self._service.read(_sweep, desk, session):
            await leave(desk, model.model_id, keep=True)
        if session.ended and desk.sessions.ended_for(session) > self._service.keep_sessions_s:
            await self._service.read(forget_session, desk, session.id)


def _sweep(desk: Desk, session: Session) -> list[Model]:
    """Deletes what has had its time; returns models that ought to have left.

    A process may have died before they had.
    """
    models = desk.sessions.models(session.id)
    for model in models:
        if model.job:
            is_over = desk.service.store.jobs.get(model.job).state.is_over
            keep = 0 if session.ended else KEPT_FOR_SAMPLERS
            sweep(desk.checkpoints, model, desk.service.in_use, keep=keep, is_over=is_over)
    sweep_samples(desk.sessions.all_samples(session.id), time.time() - SAMPLES_S)
    return [model for model in models if session.ended is not None and model.left is None]
