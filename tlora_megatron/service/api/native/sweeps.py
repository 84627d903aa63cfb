"""`/v1/sweeps`: sends trials that are compared at rungs, and shows and ends them together."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from pydantic import BaseModel

from tlora_megatron.config.load import split_sweep
from tlora_megatron.service.api.gate import Caller, Reader, Submitter, missing
from tlora_megatron.service.api.native.jobs import answers
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.submitting import read_body, submit
from tlora_megatron.service.removal import act_on
from tlora_megatron.service.store import NotFound
from tlora_megatron.service.sweeps import (
    StoredSweep,
    add_sweep,
    find_sweep,
    shown_sweep,
    sweep_id,
    sweeps_of,
)


class SweepAnswer(BaseModel):
    """A sweep, its rungs, and its trials from best to worst as far as is known."""

    id: str
    name: str
    tenant: str
    submitted_at: float
    metric: str
    states: dict[str, int]
    """Number of trials by the state of their jobs."""
    rungs: list[dict[str, Any]]
    """Each with `at`, how many trials are `there`, and which were `kept`; null before."""
    steps_saved: float | None
    best: dict[str, Any] | None
    ranking: list[dict[str, Any]]


class SweepsAnswer(BaseModel):
    """All sweeps of a tenant, the newest first."""

    sweeps: list[SweepAnswer]


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/sweeps", tags=["jobs"])

    @routes.post("", status_code=201, response_model=SweepAnswer, responses=answers(409))
    async def create(
        request: Request,
        response: Response,
        caller: Submitter,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> dict[str, Any]:
        """Submits a sweep, all trials or none.

        The body is what `tlora sweep` reads, in YAML or JSON; it names files as a submit of jobs
        does. A retry with the same `Idempotency-Key` gets the same sweep and status 200.
        """
        content_type = request.headers.get("content-type", "")
        document = await service.read(read_body, await request.body(), content_type)
        sweep, jobs = await service.read(split_sweep, document)
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        own = sweep_id(caller.tenant, key)
        keep = partial(add_sweep, service.store, own, sweep)
        accepted = await submit(service, caller, jobs, key=key, schedule={"sweep": own}, also=keep)
        if not all(job.is_new for job in accepted.jobs):
            response.status_code = 200
        return await service.read(_shown, service, own, caller)

    @routes.get("", response_model=SweepsAnswer)
    async def page(caller: Reader) -> dict[str, Any]:
        """Lists the tenant's sweeps, the newest first."""

        def read() -> list[dict[str, Any]]:
            found = sweeps_of(service.store, caller.tenant)
            return [_told(service, sweep, caller) for sweep in found]

        return {"sweeps": await service.read(read)}

    @routes.get("/{sweep}", response_model=SweepAnswer, responses=answers(404))
    async def get(sweep: str, caller: Reader) -> dict[str, Any]:
        """One sweep, by its id or name; where several had a name, the newest."""
        return await service.read(_shown, service, sweep, caller)

    @routes.delete("/{sweep}", response_model=SweepAnswer, responses=answers(404))
    async def cancel(sweep: str, caller: Submitter) -> dict[str, Any]:
        """Cancels all trials that have not ended."""

        def act() -> dict[str, Any]:
            found = _find(service, sweep, caller)
            going = [job.id for job in found.jobs.values() if not job.state.is_over]
            act_on(service.home, service.store, "cancel", going, f"token {caller.token}")
            return _shown(service, found.id, caller)

        return await service.read(act)

    return routes


def _find(service: Service, text: str, caller: Caller) -> StoredSweep:
    try:
        return find_sweep(service.store, text, None if caller.is_admin else caller.tenant)
    except NotFound:
        raise missing("sweep", text) from None


def _shown(service: Service, text: str, caller: Caller) -> dict[str, Any]:
    return _told(service, _find(service, text, caller), caller)


def _told(service: Service, found: StoredSweep, caller: Caller) -> dict[str, Any]:
    shown = shown_sweep(found, service.home)
    for row in shown["ranking"] if not caller.is_admin else ():
        row["reason"] = row["reason"] and service.outward(row["reason"], found.tenant)
    return shown
