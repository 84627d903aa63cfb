"""Tenants of a service: their limits, their tokens, and rows of the files that they have sent."""

from __future__ import annotations

import base64
import hashlib
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    bindparam,
    delete,
    desc,
    func,
    select,
    update,
)

from tlora_megatron.service.home import check_tenant
from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Database, Part
from tlora_megatron.service.store.rows import (
    SCOPES,
    CheckpointNote,
    Model,
    NewUpload,
    Sampler,
    Session,
    TenantLimits,
    Token,
    Upload,
)
from tlora_megatron.service.store.states import NotFound, OverLimit

PREFIX = "tml-tlora-"
"""The `tinker` client takes no key that begins otherwise than with `tml-`."""
_LIMITS = frozenset(item.name for item in fields(TenantLimits))
_TENANT, _TOKEN, _UPLOAD = tables.tenant.c, tables.token.c, tables.upload.c
_PRESENT = _UPLOAD.deleted_at.is_(None)


class Tenants(Part):
    """The tenants of a store; one without a row has the limits that all have."""

    def limits(self, tenant: str) -> TenantLimits:
        query = select(_TENANT.limits).where(_TENANT.name == tenant)
        with self._database.read() as connection:
            return _as_limits(connection.execute(query).scalar())

    def all_limits(self) -> dict[str, TenantLimits]:
        """Limits of the tenants that have some of their own."""
        with self._database.read() as connection:
            found = connection.execute(select(tables.tenant).order_by(_TENANT.name))
            return {row.name: _as_limits(row.limits) for row in found}

    def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """Replaces a tenant's limits; raises `ValueError` if no tenant can be called so."""
        row = {"name": check_tenant(tenant), "limits": asdict(limits)}
        with self._database.write() as connection:
            connection.execute(tables.tenant.delete().where(_TENANT.name == tenant))
            connection.execute(tables.tenant.insert(), row)


def _as_limits(row: dict[str, Any] | None) -> TenantLimits:
    return TenantLimits(**{name: value for name, value in (row or {}).items() if name in _LIMITS})


class Made(NamedTuple):
    """A new token."""

    token: Token
    secret: str
    """The text that its owner sends. It is shown once: the store does not know it."""


class Tokens(Part):
    """The tokens of a store: made once, kept as digests, taken back at any time."""

    def make(self, tenant: str, scopes: Sequence[str] = SCOPES[:2]) -> Made:
        """Makes a token; raises `ValueError` if the tenant or a scope cannot be called so."""
        check_tenant(tenant)
        for scope in scopes:
            if scope not in SCOPES:
                raise ValueError(f"a scope must be one of {', '.join(SCOPES)}, got {scope!r:.80}")
        random = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
        secret = PREFIX + random
        token = Token(
            id=f"t{secrets.token_hex(5)}",
            tenant=tenant,
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            created_at=self._database.clock(),
        )
        with self._database.write() as connection:
            tables.insert(connection, token, digest=_digest(secret))
        return Made(token, secret)

    def find(self, secret: str) -> Token | None:
        """The token of a secret; None if there is none, or it was revoked."""
        known = (_TOKEN.digest == _digest(secret), _TOKEN.revoked_at.is_(None))
        return self._database.first(Token, tables.query_of(Token).where(*known))

    def all(self, tenant: str | None = None) -> list[Token]:
        """Tokens in the order in which they were made, revoked ones too."""
        query = tables.query_of(Token).order_by(_TOKEN.created_at, _TOKEN.id)
        if tenant is not None:
            query = query.where(_TOKEN.tenant == tenant)
        return self._database.all(Token, query)

    def revoke(self, token: str) -> Token:
        """Takes a token back; one that was taken back stays so."""
        change = update(tables.token).where(_TOKEN.id == token, _TOKEN.revoked_at.is_(None))
        with self._database.write():
            self._database.execute(change.values(revoked_at=self._database.clock()))
            found = self._database.first(Token, tables.query_of(Token).where(_TOKEN.id == token))
        if found is None:
            raise NotFound(f"a token's id must be one of the store's, got {token!r:.80}")
        return found


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Uploads(Part):
    """The uploads of a store. What one tenant asks never reads another's."""

    def add(
        self, new: NewUpload, *, tenant: str, most_bytes: int | None = None, besides: int = 0
    ) -> Upload:
        """Writes the row of a file that is on the disk.

        Raises:
            OverLimit: if they would have more than `most_bytes`.
        """
        row = {**asdict(new), "tenant": tenant, "created_at": self._database.clock()}
        with self._database.write() as connection:
            held = _bytes(connection, tenant) + besides
            if most_bytes is not None and held + new.size > most_bytes:
                raise OverLimit(
                    f"the files of a tenant must have at most {most_bytes:,} bytes together, got "
                    f"{held:,} and {new.size:,} more: delete some"
                )
            made = tables.upload.insert().values(**row).returning(_UPLOAD.number)
            number = int(connection.execute(made).scalar_one())
        return Upload(**row, number=number)

    def get(self, upload: str, *, tenant: str) -> Upload:
        """The tenant's file of an id; raises `NotFound` if it has none."""
        query = tables.query_of(Upload).filter_by(id=upload, tenant=tenant, deleted_at=None)
        found = self._database.first(Upload, query)
        if found is None:
            raise _missing(upload)
        return found

    def page(
        self,
        *,
        tenant: str,
        purpose: str | None = None,
        digest: str | None = None,
        after: str | None = None,
        limit: int = 100,
        newest_first: bool = True,
    ) -> list[Upload]:
        """A page of a tenant's files behind that of an id; raises `NotFound` if there is none."""
        query = tables.query_of(Upload).where(_UPLOAD.tenant == tenant, _PRESENT).limit(limit)
        query = query.order_by(desc(_UPLOAD.number) if newest_first else _UPLOAD.number)
        if purpose is not None:
            query = query.where(_UPLOAD.purpose == purpose)
        if digest is not None:
            query = query.where(_UPLOAD.digest == digest)
        with self._database.read() as connection:
            if after is not None:
                mine = (_UPLOAD.id == after, _UPLOAD.tenant == tenant)
                number = connection.execute(select(_UPLOAD.number).where(*mine)).scalar()
                if number is None:
                    raise _missing(after)
                behind = _UPLOAD.number < number if newest_first else _UPLOAD.number > number
                query = query.where(behind)
            return tables.find_all(connection, Upload, query)

    def delete(self, upload: str, *, tenant: str) -> Upload:
        """Notes that a file is gone; raises `NotFound` if the tenant has none of this id."""
        change = update(tables.upload).where(_UPLOAD.id == upload)
        with self._database.write():
            found = self.get(upload, tenant=tenant)
            self._database.execute(change.values(deleted_at=self._database.clock()))
        return found

    def bytes_of(self, tenant: str) -> int:
        """Bytes of all files of a tenant."""
        with self._database.read() as connection:
            return _bytes(connection, tenant)


def _bytes(connection: Connection, tenant: str) -> int:
    query = select(func.sum(_UPLOAD.size)).where(_UPLOAD.tenant == tenant, _PRESENT)
    return int(connection.execute(query).scalar() or 0)


def _missing(upload: str) -> NotFound:
    return NotFound(f"a file's id must be one of yours, got {upload!r:.80}")


_SESSION, _MODEL, _SAMPLER = tables.session.c, tables.model.c, tables.sampler.c
_NOTE = tables.checkpoint_note.c


class Sessions(Part):
    """The sessions of a store, with all that is theirs. What one tenant asks never reads another's.

    Heartbeats and uses of samplers are many: this object keeps them until `flush`, so that other
    processes, and the next one, learn of them later. `heard_at` knows both.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._guard = threading.Lock()
        self._heard: dict[str, float] = {}
        """Id of a session or sampler -> when it was heard of, where that is not in its row yet."""

    def add(self, session: Session) -> None:
        """Writes a session that was not there."""
        self._put(tables.session, session)

    def get(self, session: str, *, tenant: str) -> Session | None:
        """The tenant's session of an id; None if it has none."""
        query = tables.query_of(Session).filter_by(id=session, tenant=tenant)
        return self._database.first(Session, query)

    def all(self, tenant: str | None = None) -> list[Session]:
        """The sessions of a tenant, or of all, newest first."""
        query = tables.query_of(Session).order_by(desc(_SESSION.created_at), _SESSION.id)
        if tenant is not None:
            query = query.where(_SESSION.tenant == tenant)
        return self._database.all(Session, query)

    def end(self, session: str, why: str) -> None:
        """Takes no more requests of a session; the first reason stays."""
        change = update(tables.session).where(_SESSION.id == session, _SESSION.ended.is_(None))
        self._database.execute(change.values(ended=why, ended_at=self._database.clock()))

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
        query = tables.query_of(Model).filter_by(id=model, tenant=tenant)
        return self._database.first(Model, query)

    def models(self, *, tenant: str, session: str | None = None) -> list[Model]:
        """The models of a tenant, or of one of its sessions, newest first."""
        query = tables.query_of(Model).where(_MODEL.tenant == tenant)
        if session is not None:
            query = query.where(_MODEL.session == session)
        return self._database.all(Model, query.order_by(desc(_MODEL.created_at), _MODEL.id))

    def leave(self, model: Model, last_request: int) -> Model:
        """Takes no more requests of a model behind that of a number."""
        change = update(tables.model).where(_MODEL.id == model.id)
        self._database.execute(change.values(last_request=last_request))
        return replace(model, last_request=last_request)

    def put_sampler(self, sampler: Sampler) -> None:
        """Remembers a sampler, in the place of one with its id."""
        self._put(tables.sampler, sampler, _SAMPLER.id == sampler.id)

    def sampler(self, sampler: str, *, tenant: str) -> Sampler | None:
        """The tenant's sampler of an id; None if it has none."""
        query = tables.query_of(Sampler).filter_by(id=sampler, tenant=tenant)
        return self._database.first(Sampler, query)

    def samplers(self, session: str) -> list[Sampler]:
        """The samplers of a session, in the order of their numbers."""
        query = tables.query_of(Sampler).filter_by(session=session)
        return self._database.all(Sampler, query.order_by(_SAMPLER.number))

    def join_sampler(self, sampler: str) -> int:
        """Counts a copy of a sampler's client; returns its number, from 1."""
        change = update(tables.sampler).where(_SAMPLER.id == sampler)
        change = change.values(clients=_SAMPLER.clients + 1)
        with self._database.write() as connection:
            made = connection.execute(change.returning(_SAMPLER.clients))
            return int(made.scalar_one())

    def move_sampler(self, sampler: str, version: str) -> None:
        """Lets a sampler draw from another version of its weights."""
        change = update(tables.sampler).where(_SAMPLER.id == sampler)
        self._database.execute(change.values(version=version))

    def pinned(self, tenant: str) -> list[Sampler]:
        """The samplers of a tenant's open sessions that stay at a version of weights."""
        query = tables.query_of(Sampler).join(tables.session, _SESSION.id == _SAMPLER.session)
        query = query.where(_SAMPLER.tenant == tenant, _SESSION.ended.is_(None))
        return self._database.all(Sampler, query.where(_SAMPLER.version.is_not(None)))

    def needed_jobs(self) -> dict[str, str]:
        """Id of each job whose folder a client of an open session may ask for -> why."""
        with self._database.read() as connection:
            is_open = select(_SESSION.id).where(_SESSION.ended.is_(None))
            sessions = set(connection.scalars(is_open))
            models = self._database.all(Model, tables.query_of(Model))
            samplers = self._database.all(Sampler, tables.query_of(Sampler))
        used = [(model.session, name) for model in models for name in (model.id, model.loaded_from)]
        used += [(sampler.session, sampler.model_path) for sampler in samplers]
        jobs, found = {model.id: model.job for model in models}, {}
        for session, name in used:
            job = jobs.get((name or "").removeprefix("tinker://").partition("/")[0])
            if job is not None and session in sessions:
                found[job] = f"the open session {session} of a client uses"
        return found

    def note(self, note: CheckpointNote) -> None:
        """Remembers what a client says of a checkpoint, instead of what it said before."""
        same = (_NOTE.model == note.model, _NOTE.kind == note.kind, _NOTE.name == note.name)
        self._put(tables.checkpoint_note, note, *same)

    def notes(self, model: str) -> dict[tuple[str, str], CheckpointNote]:
        """What was said of a model's checkpoints, by kind and name."""
        query = tables.query_of(CheckpointNote).where(_NOTE.model == model)
        found = self._database.all(CheckpointNote, query)
        return {(note.kind, note.name): note for note in found}

    def forget_note(self, model: str, kind: str, name: str) -> None:
        """Forgets what was said of a checkpoint that is gone."""
        this = (_NOTE.model == model, _NOTE.kind == kind, _NOTE.name == name)
        self._database.execute(delete(tables.checkpoint_note).where(*this))

    def _put(self, table: Table, row: Any, *same: ColumnElement[bool]) -> None:
        """Writes a row, in the place of the one that is the same where that may be there."""
        with self._database.write() as connection:
            if same:
                connection.execute(delete(table).where(*same))
            tables.insert(connection, row)
