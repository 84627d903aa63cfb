"""Makes models, tells of them, and lets them go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from tlora_megatron.service.api.access.gate import Caller, Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.submitting.submit import submit
from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.endings import leave
from tlora_megatron.service.api.tinker.errors import TinkerRoute
from tlora_megatron.service.api.tinker.refusals import Refused
from tlora_megatron.service.api.tinker.routes.sessions import is_local
from tlora_megatron.service.api.tinker.state import creation
from tlora_megatron.service.api.tinker.state.names import ModelId, RequestId
from tlora_megatron.service.api.tinker.state.sessions import Model
from tlora_megatron.service.api.tinker.turns import turn_of
from tlora_megatron.service.api.tinker.wire import bodies
from tlora_megatron.service.api.tinker.wire.base_files import architecture_of, positions_of


def router(service: Service) -> APIRouter:
    """The routes of models."""
    routes = APIRouter(route_class=TinkerRoute)

    @routes.post("/create_model")
    async def create(body: bodies.CreateModel, caller: Submitter) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        model = await _create(desk, caller, body)
        return {
            "request_id": str(RequestId(model.model_id, 0, "create_model")),
            "model_id": model.id,
        }

    @routes.post("/get_info")
    async def info(body: bodies.OfModel, caller: Reader, request: Request) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        model = await service.read(desk.sessions.model, body.model_id)
        return await service.read(_info, desk, model, is_local(request))

    @routes.post("/unload_model")
    async def unload(body: bodies.OfModel, caller: Submitter) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        model = await service.read(desk.sessions.model, body.model_id)
        gone = await leave(desk, model.model_id, keep=False)
        seq_id = (gone.left or 0) - (gone.number(0))
        return {"request_id": str(RequestId(gone.model_id, seq_id, "unload_model"))}

    return routes


def check_optimizer(config: bodies.OptimizerConfig | None) -> None:
    """Refuses optimizers that are not AdamW.

    Raises:
        Refused: naming the family.
    """
    if config is not None and config.type != "adamw":
        raise Refused(f"optimizer_config.type must be adamw here, got {config.type!r:.80}")


async def _create(desk: Desk, caller: Caller, body: bodies.CreateModel) -> Model:
    check_optimizer(body.optimizer_config)
    await desk.service.read(desk.open_session, body.session_id)
    model_id = ModelId(body.session_id, body.model_seq_id)
    async with turn_of(model_id):
        return await _create_once(desk, caller, model_id, body)


async def _create_once(
    desk: Desk, caller: Caller, model_id: ModelId, body: bodies.CreateModel
) -> Model:
    known = await desk.service.read(desk.sessions.find_model, model_id)
    if known is not None and known.job:
        return known
    model, document = await desk.service.read(_draft, desk, model_id, body)
    made = await submit_job(desk, caller, model, document)
    await desk.service.read(desk.sessions.add_model, made)
    return made


def _draft(desk: Desk, model_id: ModelId, body: bodies.CreateModel) -> tuple[Model, dict[str, Any]]:
    base, lora = desk.base(body.base_model), body.lora_config
    lora.check_rest("lora_config")
    model = creation.new_model(
        id=str(model_id),
        base=body.base_model,
        rank=lora.rank,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        user_metadata=_texts(body.user_metadata),
    )
    return model, creation.model_document(model, lora.seed, positions_of(base))


async def submit_job(
    desk: Desk, caller: Caller, model: Model, document: Mapping[str, Any]
) -> Model:
    """Submits the job of a model, once; returns the model with the job's id.

    Raises:
        ConfigError: if the settings are no job's.
        Gone: if the session has ended meanwhile.
        OverLimit: if the tenant would have more jobs than it may.
    """
    # Before its job: nobody else would end that one.
    await desk.service.read(desk.sessions.add_model, model)
    # Behind that: who ends the session from now on finds the model.
    await desk.service.read(desk.open_session, model.model_id.session)
    asked = {"door": "tinker", "id": model.id}
    key = f"tinker/{model.id}"
    accepted = await submit(desk.service, caller, document, key=key, asked=asked)
    return replace(model, job=accepted.jobs[0].id)


def _texts(metadata: Any) -> dict[str, str] | None:
    return {key: str(value) for key, value in metadata.items()} if metadata else None


def _info(desk: Desk, model: Model, local: bool) -> dict[str, Any]:
    base = desk.service.bases().get(model.base)
    folder = None if base is None or base.path is None else str(base.path)
    # A client on this host loads the tokenizer of the base's own folder; others by its name.
    tokenizer = folder if local and folder is not None and ":" not in folder else model.base
    data = {
        "arch": None if base is None else architecture_of(base),
        "model_name": model.base,
        "tokenizer_id": tokenizer,
    }
    return {
        "type": "get_info",
        "model_data": data,
        "model_id": model.id,
        "is_lora": True,
        "lora_rank": model.rank,
        "model_name": model.base,
    }
