"""`/v1/models`: the bases of a service, and the adapters that the caller's jobs have trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from tlora_megatron.service.api.errors import missing
from tlora_megatron.service.api.gate import Caller, Reader
from tlora_megatron.service.api.openai.jobs import asked_of
from tlora_megatron.service.api.openai.objects import (
    adapter_name,
    model_object,
    model_of,
    split_model,
)
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import Job, JobState, NotFound

OWNER = "tlora"
_MOST_ADAPTERS = 1000


def router(service: Service) -> APIRouter:
    """The routes of models."""
    routes = APIRouter(prefix="/v1/models", tags=["openai"])

    @routes.get("")
    def page(caller: Reader) -> dict[str, Any]:
        """Lists bases, and the caller's newest adapters."""
        bases = [model_object(name, 0, OWNER) for name in service.bases()]
        jobs = service.store.jobs.page(
            states=[JobState.FINISHED],
            tenant=caller.tenant,
            limit=_MOST_ADAPTERS,
            newest_first=True,
        )
        return {"object": "list", "data": [*bases, *_adapters(service, jobs)]}

    @routes.get("/{model:path}")
    def get(model: str, caller: Reader) -> dict[str, Any]:
        """Looks at one model."""
        if model in service.bases():
            return model_object(model, 0, OWNER)
        for found in _adapters(service, _own_finished(service, model, caller)):
            if model.startswith(found["id"]):
                return {**found, "id": model}
        raise missing("a model", model)

    return routes


def _own_finished(service: Service, model: str, caller: Caller) -> list[Job]:
    """The caller's job that has trained a model; at most one."""
    job = split_model(model).job
    try:
        found = service.store.jobs.find(job or "", tenant=caller.tenant)
    except NotFound:
        return []
    return [found] if found.state is JobState.FINISHED else []


def _adapters(service: Service, jobs: list[Job]) -> list[dict[str, Any]]:
    """The adapters of jobs whose base has a name here."""
    names = service.base_names()
    documents = service.store.jobs.documents([job.id for job in jobs])
    found = []
    for job in jobs:
        name = _name(job, documents[job.id], names)
        if name is not None:
            found.append(model_object(name, job.ended_at or 0, job.tenant))
    return found


def _name(job: Job, document: Mapping[str, Any], names: Mapping[str, str]) -> str | None:
    asked = asked_of(document)
    if asked is not None:
        return model_of(job, asked)
    return (
        adapter_name(names[job.base], job.tenant, job.name, job.id) if job.base in names else None
    )
