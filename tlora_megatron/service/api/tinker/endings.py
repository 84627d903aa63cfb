"""Lets models leave: when their client says so, or is not heard of any more."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.state.sessions import Model
from tlora_megatron.service.journal.files import Journal
from tlora_megatron.service.store import IllegalChange, NotFound
from tlora_megatron.training.driven.requests import Request

KEPT_AS = "left"
"""Begins the name of the checkpoint that a model leaves behind."""


def end_session(desk: Desk, session_id: str, why: str) -> None:
    """Takes no more of a session; its models are saved and leave. May be called again."""
    desk.sessions.end(session_id, why)
    for model in desk.sessions.models(session_id):
        leave(desk, model, keep=True)


def leave(desk: Desk, model: Model, *, keep: bool) -> Model:
    """Writes a model's last requests, once; `left` is then the number of the very last one.

    Args:
        keep: saves its state before, if it was asked for anything.
    """
    if model.left is not None:
        return model
    number = _say_goodbye(desk, model, keep=keep) if model.job else 0
    if not number:
        _cancel(desk, model)
    gone = replace(model, left=number)
    desk.sessions.add_model(gone)
    return gone


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
