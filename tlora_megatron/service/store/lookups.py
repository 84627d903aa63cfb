"""Rows of jobs and gangs as values, read inside a transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, RowMapping, select

from tlora_megatron.service.messages import GangSpec
from tlora_megatron.service.store.errors import NotFound
from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.states import GangState, JobState
from tlora_megatron.service.store.values import Gang, Job

Item = TypeVar("Item")

_HIDDEN = {"key", "digest"}
JOB_COLUMNS = [column for column in tables.job.c if column.name not in _HIDDEN]
_MOST_PARAMETERS = 5000
"""SQLite takes 32,766 in a statement."""


def as_job(row: RowMapping | Mapping[str, Any]) -> Job:
    """The job of a row of `JOB_COLUMNS`."""
    fields: dict[str, Any] = {str(name): value for name, value in row.items()}
    fields["state"] = JobState(fields["state"])
    return Job(**fields)


def job_of(connection: Connection, job: str) -> Job:
    """The job of an id.

    Raises:
        NotFound: if there is none.
    """
    query = select(*JOB_COLUMNS).where(tables.job.c.id == job)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound(f"a job's id must be one of the store's, got {job!r}")
    return as_job(row)


def as_gang(row: RowMapping) -> Gang:
    """The gang of a row."""
    fields: dict[str, Any] = dict(row)
    del fields["last_seq"]
    fields["spec"] = GangSpec.from_json(fields["spec"])
    fields["state"] = GangState(fields["state"])
    return Gang(**fields)


def gang_row(connection: Connection, name: str, epoch: int) -> RowMapping:
    """The row of one start of a gang.

    Raises:
        NotFound: if there is none.
    """
    query = select(tables.gang).where(tables.gang.c.name == name, tables.gang.c.epoch == epoch)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound(f"a gang must be one of the store's, got {name!r} of epoch {epoch}")
    return row


def in_parts(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Parts of a list, each short enough for one statement."""
    for begin in range(0, len(items), _MOST_PARAMETERS):
        yield items[begin : begin + _MOST_PARAMETERS]
