"""Lists models and their checkpoints, as the SDK's REST client asks for them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from tlora_megatron.service.api.access.gate import Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.errors import TinkerRoute
from tlora_megatron.service.api.tinker.state.checkpoints import Saved
from tlora_megatron.service.api.tinker.state.names import Kind
from tlora_megatron.service.api.tinker.state.sessions import Model
from tlora_megatron.service.api.tinker.wire import bodies
from tlora_megatron.service.store import JobState

_TYPES: dict[Kind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_MOST = 1000
_CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


def router(service: Service) -> APIRouter:
    """The routes of training runs and checkpoints."""
    routes = APIRouter(route_class=TinkerRoute)

    @routes.get("/training_runs")
    async def runs(caller: Reader, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        found = [model for model in await service.read(desk.sessions.models) if model.job]
        page = _page(found, limit, offset)
        told = [await service.read(_run, desk, model) for model in page]
        return {"training_runs": told, "cursor": _cursor(found, limit, offset)}

    @routes.get("/training_runs/{run}")
    async def run(run: str, caller: Reader) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        model = await service.read(desk.sessions.model, run)
        return await service.read(_run, desk, model)

    @routes.get("/training_runs/{run}/checkpoints")
    async def of_run(run: str, caller: Reader) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        model = await service.read(desk.sessions.model, run)
        found = await service.read(desk.checkpoints.of, model)
        return {"checkpoints": [await service.read(_checkpoint, saved) for saved in found]}

    @routes.get("/checkpoints")
    async def of_all(caller: Reader, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        found = await service.read(_all, desk)
        told = [await service.read(_checkpoint, saved) for saved in _page(found, limit, offset)]
        return {"checkpoints": told, "cursor": _cursor(found, limit, offset)}

    @routes.delete(_CHECKPOINT)
    async def delete(run: str, kind: str, name: str, caller: Submitter) -> None:
        desk = Desk.of(service, caller.tenant)
        await service.read(desk.checkpoints.delete, f"tinker://{run}/{kind}/{name}")

    @routes.put(_CHECKPOINT + "/ttl")
    async def ttl(run: str, kind: str, name: str, body: bodies.Ttl, caller: Submitter) -> None:
        desk, path = Desk.of(service, caller.tenant), f"tinker://{run}/{kind}/{name}"
        await service.read(desk.checkpoints.set_ttl, path, body.ttl_seconds)

    return routes


def _page(found: list[Any], limit: int, offset: int) -> list[Any]:
    return found[max(0, offset) :][: min(max(0, limit), _MOST)]


def _cursor(found: list[Any], limit: int, offset: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(found)}


def _all(desk: Desk) -> list[Saved]:
    """The checkpoints of all models, newest first."""
    models = [model for model in desk.sessions.models() if model.job]
    found = [saved for model in models for saved in desk.checkpoints.of(model)]
    return sorted(found, key=lambda saved: saved.facts.created_at, reverse=True)


def _run(desk: Desk, model: Model) -> dict[str, Any]:
    checkpoints = desk.checkpoints.of(model)
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": desk.tenant,
        "is_lora": True,
        "corrupted": desk.service.store.jobs.get(model.job).state is JobState.FAILED,
        "lora_rank": model.rank,
        "last_request_time": _time(_last_request(desk, model)),
        "last_checkpoint": _last(checkpoints, "weights"),
        "last_sampler_checkpoint": _last(checkpoints, "sampler_weights"),
        "user_metadata": model.user_metadata,
    }


def _last(checkpoints: list[Saved], kind: Kind) -> dict[str, Any] | None:
    found = [saved for saved in checkpoints if saved.path.kind == kind]
    return _checkpoint(found[-1]) if found else None


def _checkpoint(saved: Saved) -> dict[str, Any]:
    expires_at = saved.facts.expires_at
    return {
        "checkpoint_id": saved.path.checkpoint_id,
        "checkpoint_type": _TYPES[saved.path.kind],
        "time": _time(saved.facts.created_at),
        "tinker_path": str(saved.path),
        "size_bytes": saved.size_bytes(),
        "public": False,
        "user_metadata": saved.facts.user_metadata,
        "expires_at": None if expires_at is None else _time(expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _last_request(desk: Desk, model: Model) -> float:
    """When a client asked something of a model last."""
    folder = desk.service.home.job(model.job) / "requests"
    return folder.stat().st_mtime if folder.is_dir() else model.created_at
