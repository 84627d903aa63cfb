"""Clients of Tinker's API: their sessions, models, samplers, and what they say of checkpoints."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Table, bindparam, delete, desc, select, update

from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Database
from tlora_megatron.service.store.rows import CheckpointNote, Model, Sampler, Session
from tlora_megatron.service.store.tables import find_all, find_one, query_of, values_of

_SESSION, _MODEL, _SAMPLER = tables.session.c, tables.model.c, tables.sampler.c
_NOTE = tables.checkpoint_note.c


class Sessions:
    """The sessions of a store, with all that is theirs. What one tenant asks never reads another's.

    Heartbeats and uses of samplers are many: this object keeps them until `flush`, so that other
    processes, and the next one, learn of them later. `heard_at` knows both.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._guard = threading.Lock()
        self._heard: dict[str, float] = {}
        """Id of a session or sampler -> when it was heard of, where that is not in its row yet."""

    def add(self, session: Session) -> None:
        """Writes a session that was not there."""
        self._put(tables.session, session)

    def get(self, session: str, *, tenant: str) -> Session | None:
        """The tenant's session of an id; None if it has none."""
        query = query_of(Session).where(_SESSION.id == session, _SESSION.tenant == tenant)
        with self._database.read() as connection:
            return find_one(connection, Session, query)

    def all(self, tenant: str | None = None) -> list[Session]:
        """The sessions of a tenant, or of all, newest first."""
        query = query_of(Session).order_by(desc(_SESSION.created_at), _SESSION.id)
        if tenant is not None:
            query = query.where(_SESSION.tenant == tenant)
        with self._database.read() as connection:
            return find_all(connection, Session, query)

    def end(self, session: str, why: str) -> None:
        """Takes no more requests of a session; the first reason stays."""
        change = update(tables.session).where(_SESSION.id == session, _SESSION.ended.is_(None))
        with self._database.write() as connection:
            connection.execute(change.values(ended=why, ended_at=self._database.clock()))

    def remove(self, session: str) -> None:
        """Forgets a session with its models, samplers and notes; jobs and checkpoints stay."""
        models = select(_MODEL.id).where(_MODEL.session == session)
        with self._database.write() as connection:
            connection.execute(delete(tables.checkpoint_note).where(_NOTE.model.in_(models)))
            connection.execute(delete(tables.model).where(_MODEL.session == session))
            connection.execute(delete(tables.sampler).where(_SAMPLER.session == session))
            connection.execute(delete(tables.session).where(_SESSION.id == session))

    def hear(self, of: str) -> None:
        """Notes that a session's client is there, or that a sampler is asked something."""
        with self._guard:
            self._heard[of] = self._database.clock()

    def heard_at(self, row: Session | Sampler) -> float:
        """When a session or a sampler was heard of last."""
        with self._guard:
            return max(row.heard_at, self._heard.get(row.id, 0.0))

    def flush(self) -> None:
        """Writes what was heard since the last time, all of it together."""
        with self._guard:
            heard = dict(self._heard)
        if not heard:
            return
        found = [{"of": of, "at": at} for of, at in heard.items()]
        with self._database.write() as connection:
            for table in (tables.session, tables.sampler):
                change = update(table).where(table.c.id == bindparam("of"))
                connection.execute(change.values(heard_at=bindparam("at")), found)
        with self._guard:
            self._heard = {of: at for of, at in self._heard.items() if heard.get(of) != at}

    def add_model(self, model: Model) -> None:
        """Writes a model that was not there; in the transaction that submits its job."""
        self._put(tables.model, model)

    def model(self, model: str, *, tenant: str) -> Model | None:
        """The tenant's model of an id; None if it has none."""
        query = query_of(Model).where(_MODEL.id == model, _MODEL.tenant == tenant)
        with self._database.read() as connection:
            return find_one(connection, Model, query)

    def models(self, *, tenant: str, session: str | None = None) -> list[Model]:
        """The models of a tenant, or of one of its sessions, newest first."""
        query = query_of(Model).where(_MODEL.tenant == tenant)
        if session is not None:
            query = query.where(_MODEL.session == session)
        with self._database.read() as connection:
            return find_all(connection, Model, query.order_by(desc(_MODEL.created_at), _MODEL.id))

    def leave(self, model: Model, last_request: int) -> Model:
        """Takes no more requests of a model behind that of a number."""
        change = update(tables.model).where(_MODEL.id == model.id)
        with self._database.write() as connection:
            connection.execute(change.values(last_request=last_request))
        return replace(model, last_request=last_request)

    def put_sampler(self, sampler: Sampler) -> None:
        """Remembers a sampler, in the place of one with its id."""
        self._put(tables.sampler, sampler, _SAMPLER.id == sampler.id)

    def sampler(self, sampler: str, *, tenant: str) -> Sampler | None:
        """The tenant's sampler of an id; None if it has none."""
        query = query_of(Sampler).where(_SAMPLER.id == sampler, _SAMPLER.tenant == tenant)
        with self._database.read() as connection:
            return find_one(connection, Sampler, query)

    def samplers(self, session: str) -> list[Sampler]:
        """The samplers of a session, in the order of their numbers."""
        query = query_of(Sampler).where(_SAMPLER.session == session).order_by(_SAMPLER.number)
        with self._database.read() as connection:
            return find_all(connection, Sampler, query)

    def join_sampler(self, sampler: str) -> int:
        """Counts a copy of a sampler's client; returns its number, from 1."""
        change = update(tables.sampler).where(_SAMPLER.id == sampler)
        change = change.values(clients=_SAMPLER.clients + 1)
        with self._database.write() as connection:
            made = connection.execute(change.returning(_SAMPLER.clients))
            return int(made.scalar_one())

    def pinned(self, tenant: str) -> list[Sampler]:
        """The samplers of a tenant's open sessions that stay at a version of weights."""
        query = query_of(Sampler).join(tables.session, _SESSION.id == _SAMPLER.session)
        query = query.where(_SAMPLER.tenant == tenant, _SESSION.ended.is_(None))
        with self._database.read() as connection:
            return find_all(connection, Sampler, query.where(_SAMPLER.version.is_not(None)))

    def note(self, note: CheckpointNote) -> None:
        """Remembers what a client says of a checkpoint, instead of what it said before."""
        same = (_NOTE.model == note.model, _NOTE.kind == note.kind, _NOTE.name == note.name)
        self._put(tables.checkpoint_note, note, *same)

    def notes(self, model: str) -> dict[tuple[str, str], CheckpointNote]:
        """What was said of a model's checkpoints, by kind and name."""
        query = query_of(CheckpointNote).where(_NOTE.model == model)
        with self._database.read() as connection:
            found = find_all(connection, CheckpointNote, query)
        return {(note.kind, note.name): note for note in found}

    def forget_note(self, model: str, kind: str, name: str) -> None:
        """Forgets what was said of a checkpoint that is gone."""
        this = (_NOTE.model == model, _NOTE.kind == kind, _NOTE.name == name)
        with self._database.write() as connection:
            connection.execute(delete(tables.checkpoint_note).where(*this))

    def _put(self, table: Table, row: Any, *same: ColumnElement[bool]) -> None:
        """Writes a row, in the place of the one that is the same where that may be there."""
        with self._database.write() as connection:
            if same:
                connection.execute(delete(table).where(*same))
            connection.execute(table.insert(), values_of(row))
