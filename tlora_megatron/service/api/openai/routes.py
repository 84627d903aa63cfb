"""`/v1/files` and `/v1/models`, and all routes of the `openai` client."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response

from tlora_megatron.service.api.gate import ApiError, Caller, Reader, Submitter, missing, refused
from tlora_megatron.service.api.native.jobs import own_job
from tlora_megatron.service.api.openai import jobs, parts
from tlora_megatron.service.api.openai.jobs import asked_of
from tlora_megatron.service.api.openai.models import adapter_name, model_of, no_model, split_model
from tlora_megatron.service.api.openai.objects import (
    RESULTS,
    file_object,
    model_object,
    page_object,
    results_csv,
    results_object,
)
from tlora_megatron.service.api.openai.uploads import PURPOSE, Incoming, read_form
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.history import History
from tlora_megatron.service.removal import act_on
from tlora_megatron.service.store import Job, JobState, NotFound, Upload


def files_router(service: Service, incoming: Incoming) -> APIRouter:
    routes = APIRouter(prefix="/v1/files", tags=["openai"])

    @routes.post("")
    async def create(request: Request, caller: Submitter) -> dict[str, Any]:
        """Takes a file of JSON lines, as `multipart/form-data` with `purpose=fine-tune`."""
        write = partial(read_form, request, "file")
        return file_object(await incoming.take(caller, write))

    @routes.get("")
    def page(
        caller: Reader,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = Query(default=10_000, ge=1, le=10_000),
        order: Literal["asc", "desc"] = "desc",
        sha256: str | None = None,
    ) -> dict[str, Any]:
        """Lists the caller's files, without those of results; of one content with `sha256`."""
        if sha256 is not None:  # the oldest: a client that asks again gets the same one
            same = service.store.uploads.page(
                tenant=caller.tenant,
                purpose=PURPOSE,
                digest=sha256,
                limit=1,
                newest_first=False,
            )
            return page_object([file_object(upload) for upload in same], has_more=False)
        found = service.store.uploads.page(
            tenant=caller.tenant,
            purpose=purpose or PURPOSE,
            after=after,
            limit=limit + 1,
            newest_first=order == "desc",
        )
        rows = [file_object(upload) for upload in found[:limit]]
        return page_object(rows, has_more=len(found) > limit)

    @routes.get("/{file}")
    def get(file: str, caller: Reader) -> dict[str, Any]:
        """Looks at one file."""
        if (ended := _job_of_results(service, file, caller)) is not None:
            return results_object(ended, len(_csv(service, ended)))
        return file_object(_own(service, file, caller))

    @routes.delete("/{file}")
    def delete(file: str, caller: Submitter) -> dict[str, Any]:
        """Deletes a file. Jobs that have read it train on."""
        _own(service, file, caller)
        service.store.uploads.delete(file, tenant=caller.tenant)
        service.home.upload(caller.tenant, file).unlink(missing_ok=True)
        return {"id": file, "object": "file", "deleted": True}

    @routes.get("/{file}/content", response_class=Response)
    def content(file: str, caller: Reader) -> Response:
        """Gives the bytes of a file; of results as CSV."""
        if (ended := _job_of_results(service, file, caller)) is not None:
            return Response(_csv(service, ended), media_type="text/csv")
        upload = _own(service, file, caller)
        path = service.home.upload(caller.tenant, upload.id)
        return FileResponse(path, media_type="application/jsonl")

    return routes


def _own(service: Service, file: str, caller: Caller) -> Upload:
    try:
        return service.store.uploads.get(file, tenant=caller.tenant)
    except (NotFound, UnicodeEncodeError):
        raise missing("a file's id", file) from None


def _job_of_results(service: Service, file: str, caller: Caller) -> Job | None:
    """The job of such a file, which has ended; None: another file's id."""
    job = file.removeprefix(RESULTS)
    if job == file:
        return None
    found = own_job(service, job, caller.tenant)
    if not found.state.is_over:
        raise missing("a file's id", f"{job} before its job has ended")
    return found


def _csv(service: Service, job: Job) -> bytes:
    return results_csv(History(service.store, service.home, job.id).read()[0])


OWNER = "tlora"
_MOST_ADAPTERS = 1000


def models_router(service: Service) -> APIRouter:
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
        try:
            job = service.store.jobs.find(split_model(model).job or "", tenant=caller.tenant)
        except NotFound:
            raise no_model(model) from None
        if job.state is JobState.FINISHED:
            for found in _adapters(service, [job]):
                if model.startswith(found["id"]):
                    return {**found, "id": model}
        raise no_model(model)

    @routes.delete("/{model:path}")
    def delete(model: str, caller: Submitter) -> dict[str, Any]:
        """Deletes a fine-tuned model, with its job and all files of it, unless one needs them."""
        found, asked = get(model, caller), split_model(model)
        if found["owned_by"] == OWNER or asked.job is None or asked.step is not None:
            raise refused("model", "be the name of a fine-tuned model of yours", model)
        acted = act_on(service.home, service.store, "remove", [asked.job], f"token {caller.token}")
        for sentence in acted.refused.values():
            raise ApiError(400, sentence, param="model")  # on 409 the client would try again
        return {"id": model, "object": "model", "deleted": True}

    return routes


def _adapters(service: Service, jobs: list[Job]) -> list[dict[str, Any]]:
    """The adapters of jobs whose base has a name here."""
    names = service.base_names()
    documents = service.store.jobs.documents([job.id for job in jobs])
    found = []
    for job in jobs:
        asked = asked_of(documents[job.id])
        if asked is not None:
            name = model_of(job, asked)
        elif job.base in names:
            name = adapter_name(names[job.base], job.tenant, job.name, job.id)
        else:
            continue
        found.append(model_object(name, job.ended_at or 0, job.tenant))
    return found


def router(service: Service) -> APIRouter:
    routes, incoming = APIRouter(), Incoming(service)
    for make in (files_router, parts.router):
        routes.include_router(make(service, incoming))
    for made in (jobs.router(service), models_router(service)):
        routes.include_router(made)
    return routes
