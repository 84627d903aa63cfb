"""Lists models and their checkpoints, as the SDK's REST client asks for them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from tlora_megatron.service.api.gate import Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.bodies import TinkerRoute
from tlora_megatron.service.api.tinker.checkpoints import Saved
from tlora_megatron.service.api.tinker.context import TenantContext
from tlora_megatron.service.api.tinker.names import Kind
from tlora_megatron.service.store import JobState, Model

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
        context = TenantContext(service, caller.tenant)
        found = await service.read(context.sessions.models, tenant=caller.tenant)
        page = _page(found, limit, offset)
        shown = [await service.read(_run, context, model) for model in page]
        return {"training_runs": shown, "cursor": _cursor(found, limit, offset)}

    @routes.get("/training_runs/{run}")
    async def run(run: str, caller: Reader) -> dict[str, Any]:
        context = TenantContext(service, caller.tenant)
        model = await service.read(context.model, run)
        return await service.read(_run, context, model)

    @routes.get("/training_runs/{run}/checkpoints")
    async def of_run(run: str, caller: Reader) -> dict[str, Any]:
        context = TenantContext(service, caller.tenant)
        model = await service.read(context.model, run)
        found = await service.read(context.checkpoints.of, model)
        return {"checkpoints": [await service.read(_checkpoint, saved) for saved in found]}

    @routes.get("/checkpoints")
    async def of_all(caller: Reader, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        context = TenantContext(service, caller.tenant)
        found = await service.read(_all, context)
        shown = [await service.read(_checkpoint, saved) for saved in _page(found, limit, offset)]
        return {"checkpoints": shown, "cursor": _cursor(found, limit, offset)}

    @routes.delete(_CHECKPOINT)
    async def delete(run: str, kind: str, name: str, caller: Submitter) -> None:
        context = TenantContext(service, caller.tenant)
        saved = await service.read(context.checkpoints.find, f"tinker://{run}/{kind}/{name}")
        await service.read(context.checkpoints.remove, saved)

    @routes.put(_CHECKPOINT + "/ttl")
    async def ttl(run: str, kind: str, name: str, body: bodies.Ttl, caller: Submitter) -> None:
        context, path = TenantContext(service, caller.tenant), f"tinker://{run}/{kind}/{name}"
        await service.read(context.checkpoints.set_ttl, path, body.ttl_seconds)

    return routes


def _page(found: list[Any], limit: int, offset: int) -> list[Any]:
    return found[max(0, offset) :][: min(max(0, limit), _MOST)]


def _cursor(found: list[Any], limit: int, offset: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(found)}


def _all(context: TenantContext) -> list[Saved]:
    """The checkpoints of all models, newest first."""
    models = context.sessions.models(tenant=context.tenant)
    found = [saved for model in models for saved in context.checkpoints.of(model)]
    return sorted(found, key=lambda saved: saved.note.created_at, reverse=True)


def _run(context: TenantContext, model: Model) -> dict[str, Any]:
    checkpoints = context.checkpoints.of(model)
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": context.tenant,
        "is_lora": True,
        "corrupted": context.service.store.jobs.get(model.job).state is JobState.FAILED,
        "lora_rank": model.rank,
        "last_request_time": _time(_last_request(context, model)),
        "last_checkpoint": _last(checkpoints, "weights"),
        "last_sampler_checkpoint": _last(checkpoints, "sampler_weights"),
        "user_metadata": model.user_metadata,
    }


def _last(checkpoints: list[Saved], kind: Kind) -> dict[str, Any] | None:
    found = [saved for saved in checkpoints if saved.path.kind == kind]
    return _checkpoint(found[-1]) if found else None


def _checkpoint(saved: Saved) -> dict[str, Any]:
    expires_at = saved.note.expires_at
    return {
        "checkpoint_id": saved.path.checkpoint_id,
        "checkpoint_type": _TYPES[saved.path.kind],
        "time": _time(saved.note.created_at),
        "tinker_path": str(saved.path),
        "size_bytes": saved.size_bytes(),
        "public": False,
        "user_metadata": saved.note.user_metadata,
        "expires_at": None if expires_at is None else _time(expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _last_request(context: TenantContext, model: Model) -> float:
    """When a client asked something of a model last."""
    folder = context.service.home.job(model.job) / "requests"
    return folder.stat().st_mtime if folder.is_dir() else model.created_at
