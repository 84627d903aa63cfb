"""`/v1/fine_tuning/jobs`: sends jobs, lists them, and tells what becomes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request

from tlora_megatron.service.api.gate import ApiError, Caller, Reader, Submitter, missing
from tlora_megatron.service.api.native.jobs import own_job, shown_event
from tlora_megatron.service.api.openai.models import model_of
from tlora_megatron.service.api.openai.objects import DOOR, job_object, page_object
from tlora_megatron.service.api.openai.submitting import Asked, Submitting
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.history import Mark, Past, Row, rows_at
from tlora_megatron.service.prepare.submission import ASKED
from tlora_megatron.service.store import IllegalChange, Job, JobState, RequestedAction

_STATES: Mapping[str, str] = {
    "queued": "Files validated, the job waits for its turn",
    "running": "Fine-tuning job started",
    "paused": "Fine-tuning job paused",
    "finished": "The job has successfully completed",
    "cancelled": "Fine-tuning job cancelled",
}
_BACK = "The job waits for its turn, to go on where it was saved"


def event_object(mark: Mark, row: Row, job: str) -> dict[str, Any] | None:
    """An event from a row as its reader may see it; None: nothing that a client asks for."""
    event = _event(row)
    if event is None:
        return None
    fixed = {"object": "fine_tuning.job.event", "created_at": int(row["at"])}
    plain = {"level": "info", "type": "message", "data": None}
    return {"id": f"{_prefix(job)}{mark}", **fixed, **plain, **event}


def mark_of(event_id: str, job: str) -> Mark | None:
    """The row of a job's history that an event was made of; None: no event is called so."""
    prefix = _prefix(job)
    return Mark.read(event_id.removeprefix(prefix)) if event_id.startswith(prefix) else None


def _prefix(job: str) -> str:
    return f"ftevent-{job}-"


def checkpoint_object(
    step: int, at: float, measured: Sequence[Row], job: str, model: str
) -> dict[str, Any]:
    """A checkpoint, written at a time, with the steps and evaluations measured at its step."""
    metrics: dict[str, Any] = {"step": step}
    for row in measured:
        if row["kind"] == "step":
            metrics["train_loss"] = row.get("loss")
        else:
            metrics["full_valid_loss"] = row["eval_loss"]
    return {
        "id": checkpoint_id(job, step),
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(at),
        "fine_tuned_model_checkpoint": f"{model}:ckpt-step-{step}",
        "fine_tuning_job_id": job,
        "step_number": step,
        "metrics": metrics,
    }


def checkpoint_id(job: str, step: int) -> str:
    return f"ftckpt-{job}-{step}"


def _event(row: Row) -> dict[str, Any] | None:
    """Message, level, type and data of a row; None: nothing that a client asks for."""
    if row["kind"] == "step":
        loss = row.get("loss")
        shown = "none" if loss is None else f"{loss:.4f}"
        message = f"Step {row['step']}: training loss={shown}"
        names = {"loss": "train_loss", "lr": "learning_rate", "tokens": "tokens"}
        return _metrics(message, row, names)
    if row["kind"] == "evaluation":
        message = f"Step {row['step']}: full validation loss={row['eval_loss']:.4f}"
        names = {"eval_loss": "full_valid_loss", "eval_exact_match": "full_valid_exact_match"}
        return _metrics(message, row, names)
    words = _message(row)
    is_end = row["event"] == "state" and row.get("to") == "failed"
    level = "error" if is_end else "warn" if row["event"] == "said" else "info"
    return None if words is None else {"message": words, "level": level}


def _metrics(message: str, row: Row, names: Mapping[str, str]) -> dict[str, Any]:
    data = {"step": row["step"]}
    data |= {to: row[name] for name, to in names.items() if row.get(name) is not None}
    data |= {name: value for name, value in row.items() if "/" in name}  # scores of pairs
    return {"message": message, "type": "metrics", "data": data}


def _message(row: Row) -> str | None:
    kind, to = row["event"], str(row.get("to", ""))
    if kind == "submitted":
        return "Created fine-tuning job"
    if kind == "state" and to == "failed":
        return f"The job failed: {row.get('why') or 'the service says no more'}"
    if kind == "state" and to == "queued" and row.get("from") != "validating":
        return _BACK
    if kind == "state":
        return _STATES.get(to)
    if kind == "wished":
        return f"Asked to {row['wish']}"
    if kind == "saved":
        return f"Checkpoint created at step {row['step']}"
    if kind == "said" and row.get("what") == "note":
        return str(row.get("message"))
    return None


_DONE_WITHIN_S = 5.0
"""A action is answered when it is fulfilled, or after so long with the job as it is."""
_LOOK_EVERY_S = 0.05
_PAGE = 200
_FULFILLED: Mapping[RequestedAction, frozenset[JobState]] = {
    "cancel": frozenset(),
    "pause": frozenset({JobState.PAUSED}),
    "resume": frozenset(JobState) - {JobState.PAUSED},
}
"""States in which a action is fulfilled, beside those of a job that is over."""

Asking = tuple[Job, Mapping[str, Any]]
"""A job, and what was remembered of its request."""


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["openai"])
    submitting = Submitting(service)

    @routes.post("")
    async def create(
        asked: Asked,
        caller: Submitter,
        x_stainless_retry_count: Annotated[str | None, Header()] = None,
    ) -> dict[str, Any]:
        """Begins a job. A client's own retry makes no second one."""
        is_retry = (x_stainless_retry_count or "0") != "0"
        made = await submitting.submit(asked, caller, is_retry=is_retry)
        return _object(service, *made)

    @routes.get("")
    def page(
        request: Request,
        caller: Reader,
        after: str | None = None,
        limit: int = Query(default=20, ge=1, le=100),
    ) -> dict[str, Any]:
        """Lists the caller's jobs that came by this interface, the newest first."""
        wanted = {
            key[9:-1]: value
            for key, value in request.query_params.items()
            if key.startswith("metadata[") and key.endswith("]")
        }
        found = _newest(service, caller, after, limit + 1, wanted)
        return page_object(
            [_object(service, *one) for one in found[:limit]], has_more=len(found) > limit
        )

    @routes.get("/{job}")
    def get(job: str, caller: Reader) -> dict[str, Any]:
        """Looks at one job."""
        return _object(service, *_own(service, job, caller))

    for action in _FULFILLED:
        routes.add_api_route(f"/{{job}}/{action}", _asker(service, action), methods=["POST"])

    @routes.get("/{job}/events")
    def events(
        job: str,
        caller: Reader,
        after: str | None = None,
        limit: int = Query(default=20, ge=1, le=1000),
    ) -> dict[str, Any]:
        """Lists what happened to a job and its steps, the newest first."""
        found, _ = _own(service, job, caller)
        with closing(Past(service.store, service.home, found.id)) as past:
            told = list(islice(_events(service, past, found, caller, after), limit + 1))
        return page_object(told[:limit], has_more=len(told) > limit)

    @routes.get("/{job}/checkpoints")
    def checkpoints(
        job: str,
        caller: Reader,
        after: str | None = None,
        limit: int = Query(default=10, ge=1, le=1000),
    ) -> dict[str, Any]:
        """Lists the checkpoints that a job has written, the newest first."""
        found, asked = _own(service, job, caller)
        events = service.store.events.after(0, job=found.id, kinds=["saved"], limit=None)
        saved = {int(event.body["step"]): event.at for event in events}
        model = model_of(found, asked)
        steps, has_more = _newest_first(list(saved), found.id, after, limit)
        measured = rows_at(service.home, found.id, steps)
        return page_object(
            [checkpoint_object(s, saved[s], measured[s], found.id, model) for s in steps],
            has_more=has_more,
        )

    return routes


def asked_of(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The request that made a job, as remembered; None: it came by another API."""
    asked: Mapping[str, Any] | None = document.get(ASKED)
    return asked if asked is not None and asked.get("door") == DOOR else None


def _asker(service: Service, action: RequestedAction) -> Callable[..., Any]:
    async def ask(job: str, caller: Submitter) -> dict[str, Any]:
        found, asked = await service.read(_own, service, job, caller)
        try:
            await service.change(
                lambda: service.store.jobs.request_action(found.id, action, by=caller.token)
            )
        except IllegalChange as error:
            # Not 409, which the client takes for something that another attempt mends.
            raise ApiError(400, str(error)) from error
        return _object(service, await _fulfilled(service, found.id, action), asked)

    ask.__doc__ = f"Asks to {action} a job; answers when it is done, or soon after."
    return ask


async def _fulfilled(service: Service, job: str, action: RequestedAction) -> Job:
    """The job when its action is fulfilled; as it is, if that takes long or nobody serves."""
    end_s = time.monotonic() + _DONE_WITHIN_S
    while True:
        found = await service.read(service.store.jobs.get, job)
        is_done = found.state.is_over or found.state in _FULFILLED[action]
        is_served = await service.read(lambda: service.is_served)
        if is_done or time.monotonic() > end_s or not is_served:
            return found
        await asyncio.sleep(_LOOK_EVERY_S)


def _own(service: Service, job: str, caller: Caller) -> Asking:
    """The caller's job of an id or name, if it came by this interface."""
    found = own_job(service, job, caller.tenant)
    asked = asked_of(service.store.jobs.document(found.id))
    if asked is None:
        raise missing("a fine-tuning job", job)
    return found, asked


def _newest(
    service: Service, caller: Caller, after: str | None, count: int, wanted: Mapping[str, str]
) -> list[Asking]:
    """The caller's newest jobs behind one, whose metadata hold what is wanted."""
    number = None if after is None else own_job(service, after, caller.tenant).number
    found: list[Asking] = []
    while len(found) < count:
        jobs = service.store.jobs.page(
            tenant=caller.tenant, after=number, limit=_PAGE, newest_first=True
        )
        documents = service.store.jobs.documents([job.id for job in jobs])
        for job in jobs:
            asked = asked_of(documents[job.id])
            if asked is not None and wanted.items() <= (asked["metadata"] or {}).items():
                found.append((job, asked))
        if len(jobs) < _PAGE:
            break
        number = jobs[-1].number
    return found[:count]


def _events(
    service: Service, past: Past, job: Job, caller: Caller, after: str | None
) -> Iterator[dict[str, Any]]:
    """A job's events before one as its tenant may see them, the newest first."""
    mark = None if after is None else mark_of(after, job.id)
    rows = None if after is not None and mark is None else past.before(mark)
    if rows is None:
        raise missing("after", str(after))
    for at, row in rows:
        # Why a gang died may be another tenant's doing.
        shown = shown_event(service, row, caller)
        event = None if shown is None else event_object(at, shown, job.id)
        if event is not None:
            yield event


def _newest_first(
    steps: list[int], job: str, after: str | None, limit: int
) -> tuple[list[int], bool]:
    """A page of the steps of checkpoints, and whether there are older ones."""
    end = len(steps)
    if after is not None:
        places = [i for i, step in enumerate(steps) if checkpoint_id(job, step) == after]
        if not places:
            raise missing("after", after)
        end = places[0]
    begin = max(0, end - limit)
    return steps[begin:end][::-1], begin > 0


def _object(service: Service, job: Job, asked: Mapping[str, Any]) -> dict[str, Any]:
    found = job_object(job, asked)
    if found["error"] is not None:
        found["error"]["message"] = service.outward(found["error"]["message"], job.tenant)
    return found
