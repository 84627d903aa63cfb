"""What a service tells of itself: events in one order, decisions, and what is shown now."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, desc, exists, select

from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Part
from tlora_megatron.service.store.rows import WHY_QUEUED, Board, Decision, Event
from tlora_megatron.service.store.states import OVER

_EVENT, _DECISION = tables.event.c, tables.decision.c
KEPT_S, KEPT = 30 * 86_400.0, 1_000_000
"""Seconds for which events are kept, and how many of them."""
_AT_ONCE = 10_000
"""Events removed at a time: 0.1 s."""
DECISIONS_KEPT = 10_000
"""Older decisions are removed: each holds what it looked at."""


class Events(Part):
    """Reads events, and writes those that change nothing else."""

    def add(
        self,
        kind: str,
        *,
        job: str | None = None,
        gang: str | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        with self._database.write() as connection:
            tables.record(connection, self._database.clock(), kind, job=job, gang=gang, body=body)

    def forget_old(self) -> bool:
        """Removes some of those that are not needed any more; True if there may be others.

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
        limit: int | None = 1000,
    ) -> list[Event]:
        """The first events after number `seq`, in order; of one job, gang or some kinds only."""
        query = tables.query_of(Event).where(_EVENT.seq > seq).order_by(_EVENT.seq).limit(limit)
        if job is not None:
            query = query.where(_EVENT.job == job)
        if gang is not None:
            query = query.where(_EVENT.gang == gang)
        if kinds is not None:
            query = query.where(_EVENT.kind.in_(kinds))
        return self._database.all(Event, query)


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


class Decisions(Part):
    """The newest decisions of a store."""

    def add(self, snapshot: Mapping[str, Any], actions: Sequence[Any], why: str) -> None:
        """Notes a decision, on what it looked and what it does."""
        row = {
            "at": self._database.clock(),
            "snapshot": dict(snapshot),
            "actions": list(actions),
            "why": why,
        }
        with self._database.write() as connection:
            made = tables.decision.insert().values(**row).returning(_DECISION.seq)
            seq = connection.execute(made).scalar_one()
            connection.execute(delete(tables.decision).where(_DECISION.seq <= seq - DECISIONS_KEPT))

    def newest(self, limit: int = 100, *, before: int | None = None) -> list[Decision]:
        """The last decisions, newest first; only those before number `before`, if it is given."""
        query = tables.query_of(Decision).order_by(desc(_DECISION.seq)).limit(limit)
        if before is not None:
            query = query.where(_DECISION.seq < before)
        return self._database.all(Decision, query)


class Boards(Part):
    """The tables that a controller shows of the present moment, each written over by the next."""

    def write(self, name: str, body: Mapping[str, Any]) -> None:
        """Shows something in the place of what was shown under this name."""
        board = Board(name=name, at=self._database.clock(), body=dict(body))
        with self._database.write() as connection:
            connection.execute(delete(tables.board).where(tables.board.c.name == name))
            tables.insert(connection, board)

    def why_jobs_wait(self) -> Mapping[str, str]:
        """Id -> the reason why a queued job waits; of the first ones, as a controller has said."""
        query = tables.query_of(Board).where(tables.board.c.name == WHY_QUEUED)
        found = self._database.first(Board, query)
        return {} if found is None else found.body

    def speeds_of_jobs(self) -> Mapping[str, Mapping[str, float | None]]:
        """Id -> tokens a second of a job in a gang, as measured and as promised when it joined."""
        query = tables.query_of(Board).where(tables.board.c.name == "groups")
        found = self._database.first(Board, query)
        return {
            member["job"]: {
                "tokens_per_s": member.get("measured_tokens_per_s"),
                "promised_tokens_per_s": member.get("predicted_tokens_per_s"),
            }
            for group in (() if found is None else found.body["groups"])
            for member in group["members"]
        }

    def read(self) -> dict[str, Board]:
        """All that a controller shows, by name."""
        own = ~tables.board.c.name.contains("/")
        found = self._database.all(Board, tables.query_of(Board).where(own))
        return {board.name: board for board in found}

    def under(self, prefix: str) -> list[Board]:
        """What is kept under names that begin so."""
        query = tables.query_of(Board).where(tables.board.c.name.startswith(prefix))
        return self._database.all(Board, query)
