"""Samples from bases and from what models have learnt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from tlora_megatron.service.api.access.gate import Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.drawing import Drawing
from tlora_megatron.service.api.tinker.errors import TinkerRoute
from tlora_megatron.service.api.tinker.refusals import Refused
from tlora_megatron.service.api.tinker.state.checkpoints import Saved
from tlora_megatron.service.api.tinker.state.names import RequestId, SamplerId
from tlora_megatron.service.api.tinker.state.sessions import SampledFrom
from tlora_megatron.service.api.tinker.wire import bodies
from tlora_megatron.service.api.tinker.wire.prompts import check_sample
from tlora_megatron.training.saving.writer import AdapterVersion


def router(service: Service, drawing: Drawing) -> APIRouter:
    """The routes of samplers."""
    routes = APIRouter(route_class=TinkerRoute)

    @routes.post("/create_sampling_session")
    async def create(body: bodies.CreateSampler, caller: Submitter) -> dict[str, Any]:
        desk = Desk.of(service, caller.tenant)
        sampler = await service.read(_create, desk, body)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    @routes.post("/join_sampling_session")
    async def join(body: bodies.OfSampler, caller: Submitter) -> dict[str, Any]:
        sessions = Desk.of(service, caller.tenant).sessions
        count = await service.read(sessions.join_sampler, body.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": count}

    @routes.get("/samplers/{sampler_id}")
    async def get(sampler_id: str, caller: Reader) -> dict[str, Any]:
        sessions = Desk.of(service, caller.tenant).sessions
        sampler = await service.read(sessions.sampler, sampler_id)
        return {
            "sampler_id": sampler.id,
            "base_model": sampler.base,
            "model_path": sampler.model_path,
            "version": sampler.version,
        }

    @routes.post("/asample")
    async def sample(body: bodies.Sample, caller: Submitter) -> dict[str, Any]:
        check_sample(body)
        desk = Desk.of(service, caller.tenant)
        request = await service.read(_request, desk, body)
        await drawing.take(desk, request, body)
        ids = [f"{request}:{index}" for index in range(body.num_samples)]
        return {"request_id": str(request), "sample_sequence_ids": ids}

    @routes.post("/cancel_future")
    async def cancel(body: bodies.RetrieveFuture, caller: Submitter) -> None:
        desk, request = Desk.of(service, caller.tenant), RequestId.parse(body.request_id)
        if isinstance(request.of, SamplerId):
            await service.read(desk.sessions.sampler, str(request.of))
            drawing.cancel(desk, request)

    return routes


def _create(desk: Desk, body: bodies.CreateSampler) -> SampledFrom:
    _check_on(desk)
    desk.open_session(body.session_id)
    if body.base_model is None and body.model_path is None:
        raise Refused("base_model or model_path must be given, got neither")
    base = body.base_model
    if body.model_path is not None:
        base = desk.sessions.model(str(_sampleable(desk, body.model_path).path.model)).base
    desk.base(str(base))
    id = str(SamplerId(body.session_id, body.sampling_session_seq_id))
    known = desk.sessions.find_sampler(id)
    if known is not None and (known.base, known.model_path) == (base, body.model_path):
        return known  # a retry must not move it to weights that were published since
    return _pinned(desk, SampledFrom(id=id, base=str(base), model_path=body.model_path))


def _pinned(desk: Desk, sampler: SampledFrom) -> SampledFrom:
    """Remembers a sampler of the weights to which its path leads now."""
    version = _version(desk, sampler)
    while True:
        pinned = replace(sampler, version=None if version is None else str(version))
        desk.sessions.add_sampler(pinned)
        before, version = version, _version(desk, sampler)
        if version == before:  # its name led there when it was noted, so nobody has deleted it
            return pinned


def _version(desk: Desk, sampler: SampledFrom) -> AdapterVersion | None:
    path = sampler.model_path
    return None if path is None else _sampleable(desk, path).version


def _sampleable(desk: Desk, path: str) -> Saved:
    saved = desk.checkpoints.find(path)
    if saved.path.kind != "sampler_weights":
        raise Refused(f"model_path must be one of save_weights_for_sampler, got {path!r}")
    return saved


def _request(desk: Desk, body: bodies.Sample) -> RequestId:
    _check_on(desk)
    if body.sampling_session_id is None or body.seq_id is None:
        raise Refused("sampling_session_id and seq_id must be given: create_sampling_session first")
    sampler = desk.sessions.sampler(body.sampling_session_id)
    desk.open_session(SamplerId.parse(sampler.id).session)
    desk.sessions.note_use(sampler.id)
    return RequestId(SamplerId.parse(sampler.id), body.seq_id, "sample")


def _check_on(desk: Desk) -> None:
    if desk.service.sampler is None:
        raise Refused("this service must generate to be sampled from: `tlora serve --sampler own`")
