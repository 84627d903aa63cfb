"""What those who watch a service ask: `/healthz`, `/readyz` without a token, `/metrics` with one.

Anybody may ask the first two: they answer one word, and look once a second at most.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tlora_megatron.service.api.figures import Figures
from tlora_megatron.service.api.gate import Scraper
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import StoreError

PATHS = ("/healthz", "/readyz")
"""Who asks by a pod's address asks by no name of `--allow-host`."""
_READY = "ready"
_KNOWN_S = 1.0
PATIENCE_S = 5.0
"""A store or a disk that has not answered after so long is taken for one that cannot be used."""


class _Readiness:
    """Whether jobs that come now are kept and trained; known for a second."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._guard = asyncio.Lock()
        self._known: tuple[float, str] = (float("-inf"), _READY)

    async def word(self) -> str:
        """`ready`, or what is missing: `store`, `controller` or `bases`."""
        async with self._guard:
            if time.monotonic() > self._known[0]:
                found = await self._look()
                self._known = (time.monotonic() + _KNOWN_S, found)
            return self._known[1]

    async def _look(self) -> str:
        service, missing = self._service, "store"
        try:
            async with asyncio.timeout(PATIENCE_S):
                await service.change(lambda: None)  # a transaction, as that of a submit
                if not await service.read(service.store.lock.is_held):
                    return "controller"
                missing = "bases"
                bases = await service.read(service.bases)
                files = [base.config_file for base in bases.values()]
                there = await service.read(lambda: all(file.is_file() for file in files))
        except (StoreError, OSError, ValueError):  # a time-out is an OSError
            return missing
        return _READY if there else missing


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["metrics"], default_response_class=PlainTextResponse)
    readiness, figures = _Readiness(service), Figures(service)

    @routes.get("/healthz")
    async def healthz() -> str:
        """`ok` as long as this process answers."""
        return "ok"

    @routes.get("/readyz")
    async def readyz() -> PlainTextResponse:
        """`ready`; else 503 and what is missing: `store`, `controller` or `bases`."""
        word = await readiness.word()
        return PlainTextResponse(word, 200 if word == _READY else 503)

    @routes.get("/metrics")
    async def metrics(caller: Scraper) -> PlainTextResponse:
        """All figures, for Prometheus. Takes a token of the scope `scrape` or `admin`."""
        text = await service.read(figures.text)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    return routes
