"""The list of all that happened, in one order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, delete, desc, exists, select

from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database
from tlora_megatron.service.store.states import OVER
from tlora_megatron.service.store.values import Event

_EVENT = tables.event.c
KEPT_S, KEPT = 30 * 86_400.0, 1_000_000
"""Seconds for which events are kept, and how many of them."""
_AT_ONCE = 10_000
"""Events removed at a time: 0.1 s."""


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

    def forget_old(self) -> bool:
        """Removes some of those that nobody needs any more; True if there may be others.

        Events are kept for 30 days, and the newest million of them; those of unfinished jobs, and
        the last one of all, for longer.
        """
        with self._database.write() as connection:
            last = self.last()
            until = _last_before(connection, self._database.clock() - KEPT_S, last)
            of_unfinished = exists().where(
                tables.job.c.id == _EVENT.job, tables.job.c.state.not_in(OVER)
            )
            old = select(_EVENT.seq).where(_EVENT.seq <= min(max(until, last - KEPT), last - 1))
            old = old.where(~of_unfinished).order_by(_EVENT.seq).limit(_AT_ONCE)
            found = connection.execute(delete(tables.event).where(_EVENT.seq.in_(old)))
            return found.rowcount == _AT_ONCE

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


def _last_before(connection: Connection, at: float, last: int) -> int:
    """A number up to which all events are older than a time; their numbers grow with it."""
    low, high = 0, last
    while low < high:
        middle = (low + high + 1) // 2
        query = select(_EVENT.seq, _EVENT.at).where(_EVENT.seq <= middle)
        row = connection.execute(query.order_by(desc(_EVENT.seq)).limit(1)).first()
        if row is None or row.at < at:
            low = middle
        else:
            high = row.seq - 1
    return low
