"""The app of a service: all its routers, the format of its errors, and its limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI

import tlora_megatron
from tlora_megatron.service.api import errors
from tlora_megatron.service.api.limits import Limits
from tlora_megatron.service.api.native import archives, history, jobs
from tlora_megatron.service.api.openai import routes as openai
from tlora_megatron.service.api.page import router as page
from tlora_megatron.service.api.page.metrics import Latencies
from tlora_megatron.service.api.reading import routes as reading
from tlora_megatron.service.api.sampling import routes as sampling
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import router as tinker
from tlora_megatron.service.api.tinker.errors import tinker_format

_FORMATS: Mapping[str, errors.Format] = {tinker.PREFIX: tinker_format}
"""Beginning of a path -> the format of its errors, where it is not ours and OpenAI's."""


def make_app(service: Service) -> FastAPI:
    """The app of a service; it ends what its routers started, but closes neither store nor home."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        await service.close()

    app = FastAPI(
        title="tLoRA service",
        version=tlora_megatron.__version__,
        openapi_tags=reading.TAGS,
        docs_url=None,  # FastAPI's page loads its scripts from somewhere else
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    errors.install(app, _FORMATS)
    app.add_middleware(Limits, formats=_FORMATS, know=service.gate.know)
    app.add_middleware(Latencies)
    for room in (jobs, history, archives):
        app.include_router(room.router(service))
    app.include_router(reading.router())
    app.include_router(page.router(service))
    app.include_router(sampling.router(service))
    app.include_router(tinker.router(service))
    app.include_router(openai.router(service))
    return app
