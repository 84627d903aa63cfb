"""Lets models leave when their client says so or is silent, and forgets them in the end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.refusals import UnknownId
from tlora_megatron.service.api.tinker.state.names import ModelId
from tlora_megatron.service.api.tinker.state.sessions import Model
from tlora_megatron.service.api.tinker.turns import turn_of
from tlora_megatron.service.request_log import RequestLog as Journal
from tlora_megatron.service.store import IllegalChange, NotFound
from tlora_megatron.training.driven.requests import Request

KEPT_AS = "left"
"""Begins the name of the checkpoint that a model leaves behind."""


async def end_session(desk: Desk, session_id: str, why: str) -> None:
    """Takes no more of a session; its models are saved and leave. May be called again."""
    await desk.service.read(desk.sessions.end, session_id, why)
    for model in await desk.service.read(desk.sessions.models, session_id):
        await leave(desk, model.model_id, keep=True)


async def leave(desk: Desk, model_id: ModelId, *, keep: bool) -> Model:
    """Writes a model's last requests, once; `left` is then the number of the very last one.

    Who is just making the model is waited for: what it makes leaves, too.

    Args:
        keep: saves its state before, if it was asked for anything.
    """
    async with turn_of(model_id):
        return await desk.service.read(_leave, desk, model_id, keep=keep)


def _leave(desk: Desk, model_id: ModelId, *, keep: bool) -> Model:
    model = desk.sessions.find_model(model_id)
    if model is None:
        raise UnknownId(f"model_id must be one of the tenant's, got {str(model_id)!r}")
    if model.left is not None:
        return model
    number = _say_goodbye(desk, model, keep=keep) if model.job else 0
    if not number:
        _cancel(desk, model)
    gone = replace(model, left=number)
    desk.sessions.add_model(gone)
    return gone


def forget_session(desk: Desk, session_id: str) -> None:
    """Deletes a session that has ended, with all requests and answers of its models.

    As long as a model has a checkpoint, its session stays, so that the checkpoint can be listed,
    loaded and sampled from; as long as its job has not left, its requests do.
    """
    is_needed = False
    for model in desk.sessions.models(session_id):
        if not model.job:
            continue
        if not desk.service.store.jobs.get(model.job).state.is_over:
            is_needed = True
            continue
        desk.journal(model).forget()
        is_needed |= desk.checkpoints.has_any(model)
    if not is_needed:
        desk.sessions.remove(session_id)


def _say_goodbye(desk: Desk, model: Model, *, keep: bool) -> int:
    """Writes a model's last requests; returns the last one's number, 0 = its job may just end."""
    journal, job = desk.journal(model), desk.service.store.jobs.get(model.job)
    number = _free_number(journal)
    if keep and (job.state.is_over or (number == 1 and job.started_at is None)):
        return 0
    if keep and number > 1:
        _write(journal, "save_state", name=f"{KEPT_AS}-{number}", overwrite=True)
    return _write(journal, "leave")


def _write(journal: Journal, op: str, **params: object) -> int:
    """Writes a request behind those that the job can carry out; returns its number."""
    request = Request(op=op, params=params)  # type: ignore[arg-type]
    while not journal.write_request(number := _free_number(journal), request):
        pass
    return number


def _free_number(journal: Journal) -> int:
    """The number for which the job would wait; requests behind it may lie there for ever."""
    number = journal.covered() + 1
    while journal.state(number) != "unknown":
        number += 1
    return number


def _cancel(desk: Desk, model: Model) -> None:
    """Ends the job of a model that has learnt nothing, if there is one."""
    with suppress(NotFound, IllegalChange):
        job = desk.service.store.jobs.find(model.model_id.job_name, tenant=desk.tenant)
        desk.service.store.jobs.wish(job.id, "cancel", by="its client has gone")
