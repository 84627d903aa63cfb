"""Jobs as their own tenant and administrators see them."""

from __future__ import annotations

from typing import Any

from tlora_megatron.service.api.access.gate import Caller
from tlora_megatron.service.api.errors import missing
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.rows import job_to_dict
from tlora_megatron.service.store import LIVE, Job, NotFound

_FOR_ADMINS = ("granted", "released")
_OF_GANGS = "its gang ended or was arranged anew: it goes on from its last checkpoint"


def own_job(service: Service, text: str, tenant: str) -> Job:
    """The tenant's job of an id or a name.

    Raises:
        ApiError: 404 if it has none, also where another tenant has.
    """
    try:
        return service.store.jobs.find(text, tenant=tenant)
    except (NotFound, UnicodeEncodeError):
        raise missing("job", text) from None


def visible_job(service: Service, text: str, caller: Caller) -> Job:
    """The caller's job of an id or a name; for administrators also any other's of an id."""
    if caller.is_admin:
        try:
            return service.store.jobs.get(text)
        except (NotFound, UnicodeEncodeError):
            pass
    return own_job(service, text, caller.tenant)


def shown_job(service: Service, job: Job, caller: Caller) -> dict[str, Any]:
    """A job as a row; only administrators read paths of the service's host."""
    row = {**job_to_dict(job), "tenant": job.tenant}
    if not caller.is_admin and job.error is not None:
        row["error"] = service.outward(job.error, job.tenant)
    return row


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
