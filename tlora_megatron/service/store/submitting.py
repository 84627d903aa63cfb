"""Accepts jobs, each exactly once."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, func, select, text

from tlora_megatron.config.reader import must
from tlora_megatron.service.store import tables
from tlora_megatron.service.store.rows import Job, NewJob
from tlora_megatron.service.store.states import OVER, JobState, KeyReused, NameTaken, OverLimit

_JOB = tables.job.c
_encode = json.JSONEncoder(sort_keys=True, default=dict).encode
_ID = re.compile(r"j\d+[a-z]{4}")


def insert_jobs(
    connection: Connection,
    new: Sequence[NewJob],
    tenant: str,
    at: float,
    most_unfinished: int | None = None,
) -> list[Job]:
    """Writes the jobs whose keys are new; returns the jobs of all keys in the order given.

    Raises:
        OverLimit: if the tenant would have more unfinished jobs than it may.
        KeyReused: if a key came before, or twice, with another job.
        NameTaken: if an unfinished job has the name of a new one, or two new ones share it.
        ConfigError: if a name looks like a job's id.
    """
    digests = _digests(new)
    known = _known(connection, tenant, list(digests))
    for key, (digest, job) in known.items():
        if digest != digests[key]:
            raise KeyReused(
                f"an idempotency key must come with the same job again, got {key!r} of job "
                f"{job.name!r} ({job.id}) with another document: give the new job a key of its own"
            )
    first = {entry.key: entry for entry in reversed(new) if entry.key not in known}
    wanted = [entry for entry in new if first.get(entry.key) is entry]
    if most_unfinished is not None and wanted:
        _check_room(connection, tenant, len(wanted), most_unfinished)
    _check_names(connection, tenant, [entry.name for entry in wanted])
    made = _insert(connection, wanted, digests, tenant, at)
    return [made[e.key] if e.key in made else known[e.key][1] for e in new]


def _digests(new: Sequence[NewJob]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for entry in new:
        text = _encode([entry.name, entry.base, entry.document, entry.schedule])
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digests.setdefault(entry.key, digest) != digest:
            raise KeyReused(
                f"an idempotency key must belong to one job, got {entry.key!r} for job "
                f"{entry.name!r} and another of the same submit"
            )
    return digests


def _known(connection: Connection, tenant: str, keys: Sequence[str]) -> dict[str, tuple[str, Job]]:
    known = {}
    for part in tables.in_parts(keys):
        query = tables.query_of(Job).add_columns(_JOB.key, _JOB.digest)
        query = query.where(_JOB.tenant == tenant, _JOB.key.in_(part))
        for row in connection.execute(query).mappings():
            values = dict(row)
            key, digest = values.pop("key"), values.pop("digest")
            known[key] = (digest, Job(**values))
    return known


def _check_room(connection: Connection, tenant: str, num_new: int, most: int) -> None:
    # In these words SQLite finds the index that holds unfinished jobs alone.
    unfinished = select(func.count()).where(_JOB.tenant == tenant, text(tables.UNFINISHED))
    held = connection.execute(unfinished).scalar() or 0
    if held + num_new > most:
        raise OverLimit(
            f"a tenant must have at most {most:,} unfinished jobs, got {held:,} and {num_new:,} "
            "more: wait until some end, or cancel some"
        )


def _check_names(connection: Connection, tenant: str, names: Sequence[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise NameTaken(f"the jobs of a submit must have unlike names, got {times} of {name!r}")
        if _ID.fullmatch(name):
            raise must("a job's name", "not look like a job's id", name)
    for part in tables.in_parts(names):
        query = select(_JOB.name, _JOB.id, _JOB.state).where(
            _JOB.tenant == tenant, _JOB.name.in_(part), _JOB.state.not_in(OVER)
        )
        for name, job, state in connection.execute(query):
            raise NameTaken(
                f"a job's name must be unique among unfinished jobs, got {name!r}, which is {job} "
                f"and {state}: choose another name, or cancel that one"
            )


def _insert(
    connection: Connection,
    wanted: Collection[NewJob],
    digests: Mapping[str, str],
    tenant: str,
    at: float,
) -> dict[str, Job]:
    if not wanted:
        return {}
    last = connection.execute(select(func.max(_JOB.number))).scalar() or 0
    made: dict[str, Job] = {}
    rows, documents, events = [], [], []
    for number, entry in enumerate(wanted, last + 1):
        # The letters keep a new store from meeting the folders of one that was deleted.
        letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))
        job = made[entry.key] = Job(
            number=number,
            id=f"j{number}{letters}",
            tenant=tenant,
            name=entry.name,
            base=entry.base,
            state=JobState.VALIDATING,
            schedule=dict(entry.schedule),
            submitted_at=at,
            changed_at=at,
            is_new=True,
        )
        rows.append({**tables.values_of(job), "key": entry.key, "digest": digests[entry.key]})
        documents.append({"job": job.id, "body": dict(entry.document)})
        body = {"name": entry.name, "tenant": tenant}
        events.append({"at": at, "job": job.id, "kind": "submitted", "body": body})
    connection.execute(tables.job.insert(), rows)
    connection.execute(tables.document.insert(), documents)
    connection.execute(tables.event.insert(), events)
    return made
