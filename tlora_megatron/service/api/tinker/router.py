"""`/api/v1`: the paths of the unmodified `tinker` client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from tlora_megatron.service.api.gate import ApiError
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import models, runs, sampling, sessions, training
from tlora_megatron.service.api.tinker.context import TenantContext
from tlora_megatron.service.api.tinker.protobuf import INSTALL, is_installed
from tlora_megatron.service.api.tinker.sessions import Reaper

PREFIX = "/api/v1"


def tinker_format(error: ApiError) -> Mapping[str, Any]:
    """The body of a refusal: the client shows it whole."""
    return {"error": error.message, "category": "user" if error.status < 500 else "server"}


def router(service: Service) -> APIRouter:
    """The routes of Tinker's protocol; without its messages they answer how to install them."""
    routes = APIRouter(prefix=PREFIX, tags=["tinker"])
    service.quota.add_measure(lambda tenant: TenantContext(service, tenant).held_bytes())
    if not is_installed():

        @routes.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
        async def missing(path: str) -> None:
            raise ApiError(501, INSTALL)

        return routes
    tasks = sampling.SamplingTasks()
    reaper = Reaper(service)
    service.openers.append(reaper.start)
    service.closers += [tasks.close, reaper.close]
    for make in (
        *(sessions.router, models.router, training.weights_router),
        *(runs.router, runs.downloads_router),
    ):
        routes.include_router(make(service))
    for make_with_tasks in (training.router, sampling.router):
        routes.include_router(make_with_tasks(service, tasks))
    return routes
