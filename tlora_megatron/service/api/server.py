"""The app of a service, with all its routers and limits, and the process that serves it."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

import tlora_megatron
from tlora_megatron.service.api import errors
from tlora_megatron.service.api.limits import MOST_HEADER_BYTES, LimitedProtocol, Limits
from tlora_megatron.service.api.native import archives, history, jobs
from tlora_megatron.service.api.openai import routes as openai
from tlora_megatron.service.api.page import docs as reading
from tlora_megatron.service.api.page import router as page
from tlora_megatron.service.api.page.facts import Latencies
from tlora_megatron.service.api.sampling import routes as sampling
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import router as tinker
from tlora_megatron.service.api.tinker.bodies import tinker_format

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


KEEP_ALIVE_S = 75
_SWITCH_S = 0.0005
"""After so long a thread that computes lets others have the interpreter."""
_COLLECT_AT = (50_000, 20, 50)
"""Objects made, and collections of the young, after which memory is collected."""


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server of an app; `serve(sockets=[...])` runs it."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        ws="none",
        loop="asyncio",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        log_level="error",
        access_log=False,
        server_header=False,
    )
    return uvicorn.Server(config)


def prepare_process() -> None:
    """Makes this process one that serves: many connections, and no request that waits for long.

    Usual shells allow 1,024 connections. Threads hand the interpreter on after half a millisecond,
    not five, for a request is carried by several; and what stays for good is not looked through
    whenever memory is collected. Together these halve the slowest of a hundred submits.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
