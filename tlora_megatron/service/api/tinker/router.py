"""`/api/v1`: the paths of the unmodified `tinker` client."""

from __future__ import annotations

from fastapi import APIRouter

from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import (
    downloads,
    models,
    runs,
    sampling,
    sessions,
    training,
    weights,
)
from tlora_megatron.service.api.tinker.context import TenantContext
from tlora_megatron.service.api.tinker.protobuf import INSTALL, is_installed
from tlora_megatron.service.api.tinker.sessions import Reaper

PREFIX = "/api/v1"


def router(service: Service) -> APIRouter:
    """The routes of Tinker's protocol; without its messages they answer how to install them."""
    routes = APIRouter(prefix=PREFIX, tags=["tinker"])
    service.quota.add_measure(lambda tenant: TenantContext(service, tenant).held_bytes())
    if not is_installed():
        _refuse_all(routes)
        return routes
    tasks = sampling.SamplingTasks()
    reaper = Reaper(service)
    service.openers.append(reaper.start)
    service.closers += [tasks.close, reaper.close]
    for simple in (sessions, models, weights, runs, downloads):
        routes.include_router(simple.router(service))
    for room in (training, sampling):
        routes.include_router(room.router(service, tasks))
    return routes


def _refuse_all(routes: APIRouter) -> None:
    @routes.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def missing(path: str) -> None:
        raise ApiError(501, INSTALL)
