"""Decisions of controllers and what they show, for whoever asks what happens and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, desc, select

from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database
from tlora_megatron.service.store.values import Board, Decision

KEPT = 10_000
"""Older decisions are removed: each holds what it looked at."""


class Decisions:
    """The newest decisions of a store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, snapshot: Mapping[str, Any], actions: Sequence[Any], why: str) -> None:
        """Notes a decision, on what it looked and what it does."""
        row = {
            "at": self._database.clock(),
            "snapshot": dict(snapshot),
            "actions": list(actions),
            "why": why,
        }
        with self._database.write() as connection:
            made = tables.decision.insert().values(**row).returning(tables.decision.c.seq)
            seq = connection.execute(made).scalar_one()
            connection.execute(delete(tables.decision).where(tables.decision.c.seq <= seq - KEPT))

    def newest(self, limit: int = 100, *, before: int | None = None) -> list[Decision]:
        """The last decisions, newest first; only those before number `before`, if it is given."""
        query = select(tables.decision).order_by(desc(tables.decision.c.seq)).limit(limit)
        if before is not None:
            query = query.where(tables.decision.c.seq < before)
        with self._database.read() as connection:
            return [Decision(**row) for row in connection.execute(query).mappings()]


class Boards:
    """The tables that a controller shows of the present moment, each written over by the next."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, name: str, body: Mapping[str, Any]) -> None:
        """Shows something in the place of what was shown under this name."""
        row = {"name": name, "at": self._database.clock(), "body": dict(body)}
        with self._database.write() as connection:
            connection.execute(delete(tables.board).where(tables.board.c.name == name))
            connection.execute(tables.board.insert().values(**row))

    def read(self) -> dict[str, Board]:
        """All that is shown, by name."""
        with self._database.read() as connection:
            rows = connection.execute(select(tables.board)).mappings()
            return {row["name"]: Board(**row) for row in rows}
