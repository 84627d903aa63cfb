"""Addresses that can be fetched without a token, for an hour: the SDK downloads files so."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tlora_megatron.files import write_atomic
from tlora_megatron.service.api.tinker.refusals import NotSigned
from tlora_megatron.service.home import Home

LIVES_S = 3600.0
_KEY_NAME = "signing_key"
_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """The right to fetch something, for whoever holds an address."""

    tenant: str
    path: str
    """A `tinker://` path."""
    file: str | None
    """One file of the checkpoint; None = an archive of all."""
    expires_at: float
    token: str = ""
    """Id of the token that asked for it: when that is revoked, the address ends, too."""


class Signer:
    """Signs grants with a key of the service, which its folder keeps.

    Args:
        home: of the service.
        clock: gives Unix seconds.
    """

    def __init__(self, home: Home, clock: Callable[[], float] = time.time) -> None:
        self._file = home.root / _KEY_NAME
        self._clock = clock
        self._key()  # made before two requests could make one each

    def grant(self, tenant: str, path: str, file: str | None = None, token: str = "") -> Grant:
        """A grant that lives for an hour."""
        expires_at = self._clock() + LIVES_S
        return Grant(tenant=tenant, path=path, file=file, expires_at=expires_at, token=token)

    def sign(self, grant: Grant) -> str:
        """The grant as a word of an address."""
        body = _encode(json.dumps(asdict(grant)).encode())
        return f"{body}.{self._mac(body)}"

    def read(self, text: str) -> Grant:
        """The grant of a word.

        Raises:
            NotSigned: if it was not signed here, or its time is over.
        """
        body, _, mac = text.partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            raise NotSigned("an address must hold a token that this service gave")
        grant = Grant(**json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
        if grant.expires_at < self._clock():
            raise NotSigned("an address must be fetched within an hour: ask for a new one")
        return grant

    def _mac(self, body: str) -> str:
        return _encode(hmac.digest(self._key(), body.encode(), hashlib.sha256))

    def _key(self) -> bytes:
        try:
            key = self._file.read_bytes()
        except FileNotFoundError:
            key = secrets.token_bytes(_KEY_BYTES)
            write_atomic(self._file, key)
        return key


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
