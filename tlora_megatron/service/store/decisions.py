"""What controllers decided, for whoever asks why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, desc, select

from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database
from tlora_megatron.service.store.values import Decision

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

    def newest(self, limit: int = 100) -> list[Decision]:
        """The last decisions, newest first."""
        query = select(tables.decision).order_by(desc(tables.decision.c.seq)).limit(limit)
        with self._database.read() as connection:
            return [Decision(**row) for row in connection.execute(query).mappings()]
