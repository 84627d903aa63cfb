"""`/api/v1`: the paths of the unmodified `tinker` client."""

from __future__ import annotations

from fastapi import APIRouter

from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.drawing import Drawing
from tlora_megatron.service.api.tinker.reaper import Reaper
from tlora_megatron.service.api.tinker.routes import (
    downloads,
    models,
    runs,
    sampling,
    sessions,
    training,
    weights,
)
from tlora_megatron.service.api.tinker.wire.proto import INSTALL, is_installed

PREFIX = "/api/v1"


def router(service: Service) -> APIRouter:
    """The routes of Tinker's protocol; without its messages they answer how to install them."""
    routes = APIRouter(prefix=PREFIX, tags=["tinker"])
    service.quota.add_measure(lambda tenant: Desk.of(service, tenant).held_bytes())
    if not is_installed():
        _refuse_all(routes)
        return routes
    drawing = Drawing()
    reaper = Reaper(service)
    service.openers.append(reaper.start)
    service.closers += [drawing.close, reaper.close]
    for room in (sessions, models, weights, runs, downloads):
        routes.include_router(room.router(service))
    for drawn in (training, sampling):
        routes.include_router(drawn.router(service, drawing))
    return routes


def _refuse_all(routes: APIRouter) -> None:
    @routes.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def missing(path: str) -> None:
        raise ApiError(501, INSTALL)
