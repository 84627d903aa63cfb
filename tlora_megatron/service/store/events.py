"""The list of all that happened, in one order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, desc, select

from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database
from tlora_megatron.service.store.values import Event

_EVENT = tables.event.c


def record(
    connection: Connection,
    at: float,
    kind: str,
    *,
    job: str | None = None,
    gang: str | None = None,
    body: Mapping[str, Any] | None = None,
) -> None:
    """Writes one event in the transaction that makes it true."""
    row = {"at": at, "job": job, "gang": gang, "kind": kind, "body": dict(body or {})}
    connection.execute(tables.event.insert(), row)


class Events:
    """Reads events, and writes those that change nothing else."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        kind: str,
        *,
        job: str | None = None,
        gang: str | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes one event."""
        with self._database.write() as connection:
            record(connection, self._database.clock(), kind, job=job, gang=gang, body=body)

    def last(self) -> int:
        """Number of the last event, 0 before the first: the same number means nothing changed.

        Progress of running jobs is no event.
        """
        with self._database.read() as connection:
            newest = select(_EVENT.seq).order_by(desc(_EVENT.seq)).limit(1)
            return connection.execute(newest).scalar() or 0

    def after(
        self,
        seq: int,
        *,
        job: str | None = None,
        gang: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 1000,
    ) -> list[Event]:
        """The first events after number `seq`, in order; of one job, gang or some kinds only."""
        query = select(tables.event).where(_EVENT.seq > seq).order_by(_EVENT.seq).limit(limit)
        if job is not None:
            query = query.where(_EVENT.job == job)
        if gang is not None:
            query = query.where(_EVENT.gang == gang)
        if kinds is not None:
            query = query.where(_EVENT.kind.in_(kinds))
        with self._database.read() as connection:
            return [Event(**row) for row in connection.execute(query).mappings()]
