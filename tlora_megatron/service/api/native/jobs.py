"""`/v1/jobs`: sends jobs, lists them, looks at one, ends or holds it; the shapes of answers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from tlora_megatron.config.job_rows import Acted, Action, ShownJob, job_to_dict
from tlora_megatron.service.api.gate import ApiError, Caller, Reader, Submitter, missing
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.submitting import read_body, submit
from tlora_megatron.service.removal import act_on
from tlora_megatron.service.store import LIVE, Job, JobState, NotFound

_EXAMPLE = """\
base_model: quickstart
name: mirror
data: {train: file-0123456789abcdef01234567}
lora: {rank: 16}
max_steps: 200
service: {gpus: 1, max_slowdown: 1.5, priority: 0}
"""


class JobsAnswer(BaseModel):
    """The jobs of a submit."""

    jobs: list[ShownJob]
    warnings: list[str]
    served: bool


class JobsPage(BaseModel):
    """A page of jobs."""

    jobs: list[ShownJob]
    next: str | None
    """`after` of the next page; null behind the last one."""
    counts: dict[str, int] | None
    served: bool


class ActBody(BaseModel):
    """What is asked of which jobs, by their ids."""

    action: Action
    jobs: list[str] = Field(max_length=1000)


class ActAnswer(BaseModel):
    """What became of it."""

    jobs: list[ShownJob]
    refused: dict[str, str]


class CheckpointAnswer(BaseModel):
    """A checkpoint on the disk."""

    step: int
    bytes: int
    written_at: float


class CheckpointsAnswer(BaseModel):
    """The checkpoints of a job, the newest first."""

    checkpoints: list[CheckpointAnswer]


class ErrorBody(BaseModel):
    """Why a request was refused."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every refusal."""

    error: ErrorBody


_WORDS = {
    404: "there is no such job, or it is another tenant's",
    409: "the job's state, its name or the idempotency key forbids it",
}


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Refusals of a route, for the OpenAPI page."""
    return {status: {"model": ErrorAnswer, "description": _WORDS[status]} for status in statuses}


DOCUMENT: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/yaml": {"schema": {"type": "string"}, "example": _EXAMPLE},
                "application/json": {"schema": {"type": "object"}},
            },
        }
    },
    "responses": answers(409),
}
"""The OpenAPI page's description of a submit, besides its answer."""


_FOR_ADMINS = ("granted", "released")
_OF_GANGS = "its gang ended or was arranged anew: it goes on from its last checkpoint"


def own_job(service: Service, text: str, tenant: str) -> Job:
    """The tenant's job of an id or a name; 404 if it has none, also where another tenant has."""
    try:
        return service.store.jobs.find(text, tenant=tenant)
    except (NotFound, UnicodeEncodeError):
        raise missing("job", text) from None


def visible_job(service: Service, text: str, caller: Caller) -> Job:
    """The caller's job of an id or a name; for administrators also any other's of an id."""
    if caller.is_admin:
        try:
            if (found := service.store.jobs.get(text)).removed_at is None:
                return found
        except (NotFound, UnicodeEncodeError):
            pass
    return own_job(service, text, caller.tenant)


def shown_job(service: Service, job: Job, caller: Caller) -> dict[str, Any]:
    """A job as a row; only administrators read paths of the service's host."""
    row = {**job_to_dict(job), "tenant": job.tenant}
    if not caller.is_admin and job.error is not None:
        row["error"] = service.outward(job.error, job.tenant)
    return row


def _with_boards(service: Service, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Jobs as rows with what a controller says of them: why they wait, and their speeds."""
    boards = service.store.boards
    why, speeds = boards.why_jobs_wait(), boards.speeds_of_jobs()
    return [{**row, "waits": why.get(row["id"]), **speeds.get(row["id"], {})} for row in rows]


def shown_event(service: Service, row: dict[str, Any], caller: Caller) -> dict[str, Any] | None:
    """A row of a job's history; None if it is for administrators alone.

    A gang's death may be another tenant's doing, so its reason is not told to this one.
    """
    if caller.is_admin or row["kind"] != "event":
        return row
    if row["event"] in _FOR_ADMINS:
        return None
    shown = {
        key: service.outward(value, caller.tenant) if isinstance(value, str) else value
        for key, value in row.items()
    }
    if row.get("from") in LIVE and row.get("to") == "queued" and "why" in row:
        shown["why"] = _OF_GANGS
    return shown


_MOST = 1000


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/jobs", tags=["jobs"])

    @routes.post("", status_code=201, response_model=JobsAnswer, **DOCUMENT)
    async def create(
        request: Request,
        response: Response,
        caller: Submitter,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> dict[str, Any]:
        """Submits the jobs of a document, all or none.

        The body is what `tlora train` reads, in YAML or JSON: a file with `jobs`, or one job's
        keys. `base_model` is the name of a base of the service. `data.train` is the id of an
        uploaded file (`file-...`) or a path below the tenant's folder. With an `Idempotency-Key`
        retries are safe: the same body gets the same jobs and status 200, another body 409.
        """
        body = await request.body()
        content_type = request.headers.get("content-type", "")
        document = await service.read(read_body, body, content_type)
        accepted = await submit(service, caller, document, key=idempotency_key)
        if not all(job.is_new for job in accepted.jobs):
            response.status_code = 200
        rows = [shown_job(service, job, caller) for job in accepted.jobs]
        return {"jobs": rows, "warnings": accepted.notes, "served": service.is_served}

    @routes.get("", response_model=JobsPage)
    async def page(
        caller: Reader,
        state: Annotated[
            list[JobState] | None, Query(description="of these states alone; repeat it")
        ] = None,
        name: Annotated[str | None, Query(description="the one job of a name or an id")] = None,
        after: Annotated[str | None, Query(description="id of the last job of a page")] = None,
        limit: Annotated[int, Query(ge=1, le=_MOST)] = 100,
        newest_first: bool = False,
        counts: Annotated[bool, Query(description="count the jobs of each state, too")] = False,
        disk: Annotated[bool, Query(description="say what jobs have on the disk, too")] = False,
        tenant: Annotated[
            str | None, Query(description="another tenant, or `*`; for administrators")
        ] = None,
    ) -> Response:
        """Lists the tenant's jobs in the order of their submits, a page at a time."""
        of = _tenant(caller, tenant)

        def read() -> dict[str, Any]:
            if name is not None:
                found = [visible_job(service, name, caller)]
            else:
                found = service.store.jobs.page(
                    states=state,
                    tenant=of,
                    after=None if after is None else _number(service, after, of),
                    limit=limit,
                    newest_first=newest_first,
                )
            rows = _with_boards(service, [shown_job(service, job, caller) for job in found])
            if disk:
                for row in rows:
                    row["disk"] = service.home.job_bytes(row["id"])
            last = found[-1].id if len(found) == limit else None
            told = service.store.jobs.counts(tenant=of) if counts else None
            return {"jobs": rows, "next": last, "counts": told, "served": service.is_served}

        # As it is: checking a hundred rows against their own shape costs more than reading them.
        return JSONResponse(await service.read(read))

    @routes.post("/act", response_model=ActAnswer)
    async def act(body: ActBody, caller: Submitter) -> Response:
        """Asks something of many jobs, or removes those that have ended, each on its own."""
        acted = await service.read(_act_on, service, body.action, body.jobs, caller)
        rows = [shown_job(service, job, caller) for job in acted.jobs]
        return JSONResponse({"jobs": rows, "refused": acted.refused})

    @routes.get("/{job}", response_model=ShownJob, responses=answers(404))
    async def get(job: str, caller: Reader) -> dict[str, Any]:
        """One job, by its id or name; where several ended jobs had a name, the newest."""
        found = await service.read(visible_job, service, job, caller)
        (row,) = await service.read(_with_boards, service, [shown_job(service, found, caller)])
        return row

    @routes.delete("/{job}", response_model=ShownJob, responses=answers(404, 409))
    async def cancel(
        job: str,
        caller: Submitter,
        purge: Annotated[bool, Query(description="remove one that has ended, and files")] = False,
    ) -> dict[str, Any]:
        """Cancels a job: it leaves its super-model after the round under way. Its folder stays."""
        return await _act(service, job, "remove" if purge else "cancel", caller)

    @routes.post("/{job}/pause", response_model=ShownJob, responses=answers(404, 409))
    async def pause(job: str, caller: Submitter) -> dict[str, Any]:
        """Saves a job and takes it out of its super-model, or holds it back in the queue."""
        return await _act(service, job, "pause", caller)

    @routes.post("/{job}/resume", response_model=ShownJob, responses=answers(404, 409))
    async def resume(job: str, caller: Submitter) -> dict[str, Any]:
        """Puts a paused job back into the queue; it goes on at the step where it was saved."""
        return await _act(service, job, "resume", caller)

    return routes


async def _act(service: Service, text: str, action: Action, caller: Caller) -> dict[str, Any]:
    job = await service.read(visible_job, service, text, caller)
    acted = await service.read(_act_on, service, action, [job.id], caller)
    for sentence in acted.refused.values():
        raise ApiError(409, sentence)
    return shown_job(service, acted.jobs[0], caller)


def _act_on(service: Service, action: Action, jobs: list[str], caller: Caller) -> Acted[Job]:
    """Asks something of the caller's jobs of some ids, or anybody's if it is an administrator."""
    found = service.store.jobs.many(jobs)
    own = [job.id for job in found if caller.is_admin or job.tenant == caller.tenant]
    acted = act_on(service.home, service.store, action, own, f"token {caller.token}")
    acted.refused.update({job: str(missing("job", job)) for job in jobs if job not in own})
    return acted


def _tenant(caller: Caller, asked: str | None) -> str | None:
    """Whose jobs are listed; None: everybody's."""
    if asked is None or asked == caller.tenant:
        return caller.tenant
    if not caller.is_admin:
        raise ApiError(403, "tenant must be your own unless a token has the scope admin")
    return None if asked == "*" else asked


def _number(service: Service, job: str, tenant: str | None) -> int:
    try:
        found = service.store.jobs.get(job)
    except (NotFound, UnicodeEncodeError):
        raise missing("after", job) from None
    if tenant is not None and found.tenant != tenant:
        raise missing("after", job)
    return found.number
