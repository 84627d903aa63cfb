"""How a client starts, stays and ends."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request

from tlora_megatron.service.api.gate import Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.context import TenantContext, positions_of
from tlora_megatron.service.api.tinker.endings import end_session
from tlora_megatron.service.api.tinker.errors import TinkerRoute
from tlora_megatron.service.api.tinker.names import new_session
from tlora_megatron.service.store import Session

TESTED = ((0, 25), (0, 38))
"""Versions of the SDK, the first and the last, whose tests are run."""
_OF_PROXIES = frozenset({"x-forwarded-for", "x-forwarded-proto", "forwarded", "x-real-ip", "via"})
DEVIATIONS = (
    "This is tLoRA, not Tinker: the unembedding has no adapter (train_unembed has no effect); "
    "alpha is 32 (user_metadata={'tlora.lora.alpha': '16'} changes it); kind='inflight' saves "
    "snapshots. docs/tinker.md lists what else differs."
)


def router(service: Service) -> APIRouter:
    """The routes of sessions."""
    routes = APIRouter(route_class=TinkerRoute)

    @routes.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.post("/client/config")
    async def config(_: bodies.ClientConfig, caller: Reader, request: Request) -> dict[str, Any]:
        # A network is slower than zstd, the loopback interface is not.
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": not is_local(request)}

    @routes.post("/client/dynamic_config")
    async def dynamic_config(_: bodies.ClientConfig, caller: Reader) -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @routes.post("/create_session")
    async def create(body: bodies.CreateSession, caller: Submitter) -> dict[str, Any]:
        metadata = {key: str(value) for key, value in (body.user_metadata or {}).items()}
        now = service.store.database.clock()
        session = Session(
            id=new_session(),
            tenant=caller.tenant,
            created_at=now,
            sdk_version=body.sdk_version,
            display_name=body.display_name,
            user_metadata=metadata or None,
            heard_at=now,
        )
        await service.change(lambda: service.store.sessions.add(session))
        return {
            "type": "create_session",
            "session_id": session.id,
            "info_message": DEVIATIONS,
            "warning_message": _warning(body.sdk_version),
        }

    @routes.post("/session_heartbeat")
    async def heartbeat(body: bodies.OfSession, caller: Submitter) -> dict[str, str]:
        context = TenantContext(service, caller.tenant)
        session = await service.read(context.open_session, body.session_id)
        context.sessions.hear(session.id)
        return {"type": "session_heartbeat"}

    @routes.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, caller: Submitter) -> None:
        context = TenantContext(service, caller.tenant)
        await service.read(context.session, session_id)
        await end_session(context, session_id, "its client has finished")

    @routes.post("/telemetry")
    async def telemetry(caller: Submitter) -> dict[str, str]:
        return {"status": "accepted"}  # it is not kept

    @routes.get("/get_server_capabilities")
    async def capabilities(caller: Reader) -> dict[str, Any]:
        return {"supported_models": await service.read(_models, service)}

    @routes.get("/sessions")
    async def listed(caller: Reader, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        found = await service.read(service.store.sessions.all, caller.tenant)
        begin, end = max(0, offset), max(0, offset) + min(max(0, limit), 1000)
        return {"sessions": [session.id for session in found[begin:end]]}

    @routes.get("/sessions/{session_id}")
    async def get(session_id: str, caller: Reader) -> dict[str, Any]:
        context, sessions = TenantContext(service, caller.tenant), service.store.sessions
        session = await service.read(context.session, session_id)
        models = await service.read(sessions.models, tenant=caller.tenant, session=session_id)
        samplers = await service.read(sessions.samplers, session_id)
        return {
            "training_run_ids": [model.id for model in models],
            "sampler_ids": [sampler.id for sampler in samplers],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    return routes


def is_local(request: Request) -> bool:
    """True if the client is on the service's host, and no proxy is between."""
    host = None if request.client is None else request.client.host
    return host in ("127.0.0.1", "::1") and _OF_PROXIES.isdisjoint(request.headers.keys())


def _warning(version: str) -> str | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    least, most = TESTED
    if found is not None and least <= (int(found[1]), int(found[2])) <= most:
        return None
    spoken = " to ".join(".".join(map(str, end)) for end in TESTED)
    return f"the tinker SDK must be of version {spoken} to be tested here, got {version}"


def _models(service: Service) -> list[dict[str, Any]]:
    return [
        {
            "model_name": name,
            "max_context_length": positions_of(base),
            "trainable": True,
            "sampleable": service.sampler is not None,
        }
        for name, base in service.bases().items()
    ]
