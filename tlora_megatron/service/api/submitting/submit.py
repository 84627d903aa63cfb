"""Submits the jobs of a document for a tenant, within its limits; the same for every door."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.service.api.access.gate import Caller
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.submitting.references import References
from tlora_megatron.service.prepare.submission import ASKED, Submission, split_submissions
from tlora_megatron.service.store import Job, NewJob

_LONGEST_KEY = 200


class Accepted(NamedTuple):
    """The jobs of one submit."""

    jobs: list[Job]
    """`is_new` is False of all where the key came before."""
    notes: tuple[str, ...]
    """A sentence for each setting that has no effect."""


async def submit(
    service: Service,
    caller: Caller,
    document: Mapping[str, Any],
    *,
    key: str | None = None,
    asked: Mapping[str, Any] | None = None,
    also: Callable[[Sequence[Job]], None] | None = None,
) -> Accepted:
    """Submits all jobs of a document, or none.

    Args:
        service: The service.
        caller: Whose jobs they are.
        document: A file of `tlora train`, or one job beside its `base_model`; it names bases and
            files as `References` reads them.
        key: Idempotency key: the same key with the same document gives the jobs that it made.
            None: always new jobs.
        asked: What a door wants to remember in the rows' documents.
        also: Called with the jobs in the transaction that makes them: what it writes is kept with
            them or not at all, and if it raises there are no jobs.

    Raises:
        ConfigError: for the first mistake in the document.
        KeyReused: if the key came before with another document.
        NameTaken: if an unfinished job of the tenant has a name.
        OverLimit: if the tenant would have more jobs than it may.
    """
    if key is not None and (not key.isprintable() or not 0 < len(key.strip()) <= _LONGEST_KEY):
        raise must("Idempotency-Key", f"be 1 to {_LONGEST_KEY} characters of text", key)
    new, notes = await service.read(_read, service, caller, document, key, asked)
    most = caller.limits.jobs

    def make() -> list[Job]:
        jobs = service.store.jobs.submit(new, tenant=caller.tenant, most_unfinished=most)
        if also is not None:
            also(jobs)
        return jobs

    return Accepted(await service.change(make), notes)


def _read(
    service: Service,
    caller: Caller,
    document: Mapping[str, Any],
    key: str | None,
    asked: Mapping[str, Any] | None,
) -> tuple[list[NewJob], tuple[str, ...]]:
    references = References(service.home, service.store, service.bases(), tenant=caller.tenant)
    folder = service.home.tenant(caller.tenant)
    try:
        submissions, notes = split_submissions(references.resolve(document), folder)
    except ConfigError as error:
        raise ConfigError(service.outward(str(error), caller.tenant)) from error
    for entry in submissions:
        _check_gpus(entry, caller)
    # Of the whole document, so that a key means all of its jobs.
    text = json.dumps(document, sort_keys=True, default=str)
    remembered = {**(asked or {}), "submit": hashlib.sha256(text.encode()).hexdigest()}
    key = key or uuid.uuid4().hex
    new = [
        _new_job(replace(entry, tenant=caller.tenant), f"{key}/{index}", remembered)
        for index, entry in enumerate(submissions)
    ]
    return new, tuple(service.outward(note, caller.tenant) for note in notes)


def _check_gpus(submission: Submission, caller: Caller) -> None:
    gpus, most = submission.document["service"]["gpus"], caller.limits.gpus
    if most is not None and gpus > most:
        what = f"service.gpus of job {submission.name!r}"
        raise must(what, f"be at most your limit, {most}", gpus)


def _new_job(submission: Submission, key: str, asked: Mapping[str, Any]) -> NewJob:
    return NewJob(
        name=submission.name,
        document={**submission.row(), ASKED: dict(asked)},
        base=submission.base_key,
        key=key,
        schedule=dict(submission.document["service"]),
    )
