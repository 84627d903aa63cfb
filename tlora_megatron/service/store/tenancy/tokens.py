"""Tokens: made once, kept as digests, taken back at any time."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import RowMapping, select, update

from tlora_megatron.service.home import check_tenant
from tlora_megatron.service.store.errors import NotFound
from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database
from tlora_megatron.service.store.tenancy.values import SCOPES, Token

PREFIX = "tml-tlora-"
"""The `tinker` client takes no key that begins otherwise than with `tml-`."""
_TOKEN = tables.token.c


class Made(NamedTuple):
    """A new token."""

    token: Token
    secret: str
    """The text that its owner sends. It is shown once: the store does not know it."""


class Tokens:
    """The tokens of a store."""

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
        row: dict[str, Any] = {
            "id": f"t{secrets.token_hex(5)}",
            "digest": _digest(secret),
            "tenant": tenant,
            "scopes": [scope for scope in SCOPES if scope in scopes],
            "created_at": self._database.clock(),
        }
        with self._database.write() as connection:
            connection.execute(tables.token.insert(), row)
        del row["digest"]
        return Made(_as_token({**row, "revoked_at": None}), secret)

    def find(self, secret: str) -> Token | None:
        """The token of a secret; None if there is none, or it was revoked."""
        digest = _digest(secret)
        query = select(tables.token).where(_TOKEN.digest == digest, _TOKEN.revoked_at.is_(None))
        with self._database.read() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None or not hmac.compare_digest(row["digest"], digest):
            return None
        return _as_token(row)

    def all(self, tenant: str | None = None) -> list[Token]:
        """Tokens in the order in which they were made, revoked ones too."""
        query = select(tables.token).order_by(_TOKEN.created_at, _TOKEN.id)
        if tenant is not None:
            query = query.where(_TOKEN.tenant == tenant)
        with self._database.read() as connection:
            return [_as_token(row) for row in connection.execute(query).mappings()]

    def revoke(self, token: str) -> Token:
        """Takes a token back; one that was taken back stays so.

        Raises:
            NotFound: if there is none of this id.
        """
        change = update(tables.token).where(_TOKEN.id == token, _TOKEN.revoked_at.is_(None))
        query = select(tables.token).where(_TOKEN.id == token)
        with self._database.write() as connection:
            connection.execute(change.values(revoked_at=self._database.clock()))
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound(f"a token's id must be one of the store's, got {token!r:.80}")
        return _as_token(row)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _as_token(row: RowMapping | dict[str, Any]) -> Token:
    return Token(
        id=row["id"],
        tenant=row["tenant"],
        scopes=tuple(row["scopes"]),
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )
