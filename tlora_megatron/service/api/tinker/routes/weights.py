"""Saves and loads weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from tlora_megatron.files import read_json
from tlora_megatron.service.api.access.gate import Caller, Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.errors import TinkerRoute
from tlora_megatron.service.api.tinker.refusals import Refused
from tlora_megatron.service.api.tinker.routes.models import check_optimizer, submit_job
from tlora_megatron.service.api.tinker.routes.training import submit
from tlora_megatron.service.api.tinker.state import creation
from tlora_megatron.service.api.tinker.state.checkpoints import (
    EPHEMERAL,
    EXTERNAL,
    Saved,
    check_ttl,
    folder_name,
)
from tlora_megatron.service.api.tinker.state.futures import SAVE_FOR_SESSION
from tlora_megatron.service.api.tinker.state.names import (
    Kind,
    ModelId,
    RequestId,
    SamplerId,
    TinkerPath,
)
from tlora_megatron.service.api.tinker.state.sessions import Model, SampledFrom
from tlora_megatron.service.api.tinker.turns import turn_of
from tlora_megatron.service.api.tinker.wire import bodies
from tlora_megatron.training.driven.requests import Request
from tlora_megatron.training.saving.writer import AdapterVersion

_STATE = "state.json"
_SAVES: dict[Kind, str] = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""Kind of a checkpoint -> Tinker's name of the request that saves it."""


def router(service: Service) -> APIRouter:
    """The routes of weights."""
    routes = APIRouter(route_class=TinkerRoute)

    @routes.post("/save_weights")
    async def save(body: bodies.SaveWeights, caller: Submitter) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        return await service.read(_save, desk, body, "weights")

    @routes.post("/save_weights_for_sampler")
    async def save_for_sampler(body: bodies.SaveWeights, caller: Submitter) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        if body.path is None:
            return await service.read(_save_for_session, desk, body)
        return await service.read(_save, desk, body, "sampler_weights")

    @routes.post("/save_weights_external")
    async def save_external(body: bodies.SaveWeights, caller: Submitter) -> dict[str, Any]:
        if body.age_encryption_recipients:
            raise Refused("age_encryption_recipients must be left out: nothing is encrypted here")
        desk = Desk.of(service, caller.tenant)
        return await service.read(_save, desk, body, "external_weights")

    @routes.post("/load_weights")
    async def load(body: bodies.LoadWeights, caller: Submitter) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        check_optimizer(body.optimizer_config)
        if body.session_id is not None and body.model_seq_id is not None:
            return await _create_from(desk, caller, body)
        return await service.read(_load, desk, body)

    @routes.post("/weights_info")
    async def info(body: bodies.OfPath, caller: Reader) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        saved = await service.read(desk.checkpoints.find, body.tinker_path)
        model = await service.read(desk.sessions.model, str(saved.path.model))
        return {
            "base_model": model.base,
            "is_lora": True,
            "lora_rank": model.rank,
            "train_unembed": model.train_unembed,
            "train_mlp": model.train_mlp,
            "train_attn": model.train_attn,
        }

    return routes


def _save(desk: Desk, body: bodies.SaveWeights, kind: Kind) -> dict[str, Any]:
    name = body.path or f"{body.seq_id:06d}"
    for reserved in (EPHEMERAL, EXTERNAL):
        if name.startswith(reserved):
            raise Refused(f"path must not begin with {reserved!r}, got {name!r}")
    if body.ttl_seconds is not None:
        check_ttl(body.ttl_seconds)  # before anything is saved
    is_state = kind == "weights"
    overwrite = body.overwrite if is_state else True
    params = {"name": folder_name(kind, name), "overwrite": overwrite}
    request = Request(op="save_state" if is_state else "save_for_sampler", params=params)
    told = submit(desk, body.model_id, body.seq_id, _SAVES[kind], request)
    path = TinkerPath(ModelId.parse(body.model_id), kind, name)
    desk.checkpoints.note(path, body.user_metadata, body.ttl_seconds)
    return told


def _save_for_session(desk: Desk, body: bodies.SaveWeights) -> dict[str, Any]:
    """Saves weights for a sampler of their own, which the answer names."""
    if body.sampling_session_seq_id is None:
        raise Refused("path or sampling_session_seq_id must be given, got neither")
    model = desk.open_model(body.model_id)
    name = f"{EPHEMERAL}{body.sampling_session_seq_id}"
    path = TinkerPath(model.model_id, "sampler_weights", name)
    sampler = SampledFrom(
        id=str(SamplerId(model.model_id.session, body.sampling_session_seq_id)),
        base=model.base,
        model_path=str(path),
        version=str(AdapterVersion(model.job, model.number(body.seq_id))),
    )
    desk.sessions.add_sampler(sampler)
    request = Request(op="save_for_sampler", params={"name": name, "overwrite": True})
    return submit(desk, body.model_id, body.seq_id, SAVE_FOR_SESSION, request)


def _load(desk: Desk, body: bodies.LoadWeights) -> dict[str, Any]:
    """Loads a state into a model that is there."""
    if body.model_id is None or body.seq_id is None:
        raise Refused("model_id and seq_id, or session_id and model_seq_id must be given")
    model, saved = desk.open_model(body.model_id), _loadable(desk, body.path)
    _check_base(desk, model.base, saved)
    return submit(desk, model.id, body.seq_id, "load_weights", _load_request(desk, saved, body))


async def _create_from(desk: Desk, caller: Caller, body: bodies.LoadWeights) -> dict[str, Any]:
    """Makes a model whose first request is to load a state."""
    read = desk.service.read
    await read(desk.open_session, str(body.session_id))
    model_id = ModelId(str(body.session_id), int(body.model_seq_id or 0))
    async with turn_of(model_id):
        return await _create_once(desk, caller, model_id, body)


async def _create_once(
    desk: Desk, caller: Caller, model_id: ModelId, body: bodies.LoadWeights
) -> dict[str, Any]:
    read = desk.service.read
    told = {
        "request_id": str(RequestId(model_id, 0, "load_weights")),
        "model_id": str(model_id),
    }
    known = await read(desk.sessions.find_model, model_id)
    if known is not None and known.job:
        return told
    model, document, load = await read(_draft, desk, model_id, body)
    made = await submit_job(desk, caller, model, document)
    await read(desk.journal(made).write_request, 1, load)
    await read(desk.sessions.add_model, made)
    return told


def _draft(
    desk: Desk, model_id: ModelId, body: bodies.LoadWeights
) -> tuple[Model, dict[str, Any], Request]:
    saved = _loadable(desk, body.path)
    first = desk.sessions.model(str(saved.path.model))
    model = _model_like(first, model_id, body)
    _check_base(desk, model.base, saved)
    state = read_json(saved.folder / _STATE)
    return model, creation.loaded_document(model, state), _load_request(desk, saved, body)


def _model_like(first: Model, model_id: ModelId, body: bodies.LoadWeights) -> Model:
    metadata = {key: str(value) for key, value in (body.user_metadata or {}).items()}
    fresh = creation.new_model(
        id=str(model_id), base=body.base_model or first.base, rank=first.rank
    )
    return replace(
        fresh,
        train_attn=first.train_attn,
        train_mlp=first.train_mlp,
        train_unembed=first.train_unembed,
        user_metadata=metadata or None,
        loaded_from=body.path,
    )


def _loadable(desk: Desk, path: str) -> Saved:
    saved = desk.checkpoints.find(path)
    if saved.path.kind != "weights":
        raise Refused(f"path must be of weights to train on, saved by save_state, got {path!r}")
    return saved


def _check_base(desk: Desk, base: str, saved: Saved) -> None:
    """Refuses the weights of one base for another."""
    other = desk.sessions.model(str(saved.path.model)).base
    if base != other and desk.base(base) != desk.base(other):
        raise Refused(f"base_model must be {other!r}, of which {saved.path} is, got {base!r}")


def _load_request(desk: Desk, saved: Saved, body: bodies.LoadWeights) -> Request:
    params = {"path": desk.checkpoints.place(saved), "optimizer": body.optimizer}
    return Request(op="load_state", params=params)
