"""Tenants of a service: their limits, their tokens, and rows of the files that they have sent."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from sqlalchemy import Connection, desc, func, select, update

from tlora_megatron.service.home import check_tenant
from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Database
from tlora_megatron.service.store.rows import SCOPES, NewUpload, TenantLimits, Token, Upload
from tlora_megatron.service.store.states import NotFound, OverLimit
from tlora_megatron.service.store.tables import find_all, find_one, query_of, values_of

PREFIX = "tml-tlora-"
"""The `tinker` client takes no key that begins otherwise than with `tml-`."""
_LIMITS = frozenset(item.name for item in fields(TenantLimits))
_TENANT, _TOKEN, _UPLOAD = tables.tenant.c, tables.token.c, tables.upload.c
_PRESENT = _UPLOAD.deleted_at.is_(None)


class Tenants:
    """The tenants of a store; one without a row has the limits that all have."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def limits(self, tenant: str) -> TenantLimits:
        """How much a tenant may have."""
        query = select(_TENANT.limits).where(_TENANT.name == tenant)
        with self._database.read() as connection:
            return _as_limits(connection.execute(query).scalar())

    def all_limits(self) -> dict[str, TenantLimits]:
        """Limits of the tenants that have some of their own."""
        with self._database.read() as connection:
            found = connection.execute(select(tables.tenant).order_by(_TENANT.name))
            return {row.name: _as_limits(row.limits) for row in found}

    def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """Replaces a tenant's limits.

        Raises:
            ValueError: if no tenant can be called so.
        """
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


class Tokens:
    """The tokens of a store: made once, kept as digests, taken back at any time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def make(self, tenant: str, scopes: Sequence[str] = SCOPES[:2]) -> Made:
        """Makes a token.

        Raises:
            ValueError: if the tenant or a scope cannot be called so.
        """
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
            row = {**values_of(token), "digest": _digest(secret)}
            connection.execute(tables.token.insert(), row)
        return Made(token, secret)

    def find(self, secret: str) -> Token | None:
        """The token of a secret; None if there is none, or it was revoked."""
        known = (_TOKEN.digest == _digest(secret), _TOKEN.revoked_at.is_(None))
        with self._database.read() as connection:
            return find_one(connection, Token, query_of(Token).where(*known))

    def all(self, tenant: str | None = None) -> list[Token]:
        """Tokens in the order in which they were made, revoked ones too."""
        query = query_of(Token).order_by(_TOKEN.created_at, _TOKEN.id)
        if tenant is not None:
            query = query.where(_TOKEN.tenant == tenant)
        with self._database.read() as connection:
            return find_all(connection, Token, query)

    def revoke(self, token: str) -> Token:
        """Takes a token back; one that was taken back stays so.

        Raises:
            NotFound: if there is none of this id.
        """
        change = update(tables.token).where(_TOKEN.id == token, _TOKEN.revoked_at.is_(None))
        with self._database.write() as connection:
            connection.execute(change.values(revoked_at=self._database.clock()))
            found = find_one(connection, Token, query_of(Token).where(_TOKEN.id == token))
        if found is None:
            raise NotFound(f"a token's id must be one of the store's, got {token!r:.80}")
        return found


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Uploads:
    """The uploads of a store. What one tenant asks never reads another's."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self, new: NewUpload, *, tenant: str, most_bytes: int | None = None, besides: int = 0
    ) -> Upload:
        """Writes the row of a file that is on the disk.

        Args:
            new: The file.
            tenant: Its owner.
            most_bytes: Bytes that all files of the tenant may have together.
            besides: Bytes that it has beside its uploads.

        Raises:
            OverLimit: if they would have more.
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
        """The tenant's file of an id.

        Raises:
            NotFound: if it has none.
        """
        query = query_of(Upload).where(_UPLOAD.id == upload, _UPLOAD.tenant == tenant, _PRESENT)
        with self._database.read() as connection:
            found = find_one(connection, Upload, query)
        if found is None:
            raise _missing(upload)
        return found

    def page(
        self,
        *,
        tenant: str,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 100,
        newest_first: bool = True,
    ) -> list[Upload]:
        """A tenant's files from behind that of id `after` on.

        Raises:
            NotFound: if the tenant has no file of that id, deleted ones included.
        """
        query = query_of(Upload).where(_UPLOAD.tenant == tenant, _PRESENT).limit(limit)
        query = query.order_by(desc(_UPLOAD.number) if newest_first else _UPLOAD.number)
        if purpose is not None:
            query = query.where(_UPLOAD.purpose == purpose)
        with self._database.read() as connection:
            if after is not None:
                mine = (_UPLOAD.id == after, _UPLOAD.tenant == tenant)
                number = connection.execute(select(_UPLOAD.number).where(*mine)).scalar()
                if number is None:
                    raise _missing(after)
                behind = _UPLOAD.number < number if newest_first else _UPLOAD.number > number
                query = query.where(behind)
            return find_all(connection, Upload, query)

    def delete(self, upload: str, *, tenant: str) -> Upload:
        """Notes that a file is gone.

        Raises:
            NotFound: if the tenant has none of this id.
        """
        change = update(tables.upload).where(_UPLOAD.id == upload)
        with self._database.write() as connection:
            found = self.get(upload, tenant=tenant)
            connection.execute(change.values(deleted_at=self._database.clock()))
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
