"""Lets tokens in: known ones, for what their scopes allow, as often as their tenant may ask."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.service.store import Store, TenantLimits, Token

_BURST_S = 4.0
"""Seconds of the rate that a tenant may spend at once."""


class Bucket:
    """Counts one tenant's requests."""

    def __init__(self, rate_per_s: float, clock: Callable[[], float]) -> None:
        self.rate_per_s = rate_per_s
        self._clock = clock
        self._most = max(1.0, rate_per_s * _BURST_S)
        self._room = self._most if rate_per_s else 0.0
        self._at = clock()

    def take(self, tenant: str) -> None:
        """Takes one request; refuses one too many with the seconds after which there is room."""
        now = self._clock()
        self._room = min(self._most, self._room + (now - self._at) * self.rate_per_s)
        self._at = now
        if self._room < 1.0:
            wait_s = math.ceil((1.0 - self._room) / self.rate_per_s) if self.rate_per_s else 60
            raise ApiError(
                429,
                f"tenant {tenant!r} must send at most {self.rate_per_s:g} requests a second: try "
                f"again after {wait_s} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait_s)},
            )
        self._room -= 1.0


KNOWN_S = 1.0
"""A token that was revoked is let in for so long at most."""
_MOST_KNOWN = 10_000
_BEARER = HTTPBearer(auto_error=False, description="a token of `tlora token create`")
_API_KEY = APIKeyHeader(name="X-API-Key", auto_error=False, description="the same, for `tinker`")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    tenant: str
    scopes: tuple[str, ...]
    token: str
    """Id of the token, which is no secret."""
    limits: TenantLimits

    @property
    def is_admin(self) -> bool:
        """True if the caller may see all tenants."""
        return "admin" in self.scopes

    def may(self, scope: str) -> bool:
        """True if the caller has a scope."""
        return scope in self.scopes or self.is_admin


class Gate:
    """Knows tokens for a second, so that a request costs no read of the store."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, tuple[float, Caller]] = {}
        self._buckets: dict[str, Bucket] = {}

    async def admit(self, secret: str | None) -> Caller:
        """The caller of a token; refuses an unknown one, and a tenant that asks too often."""
        caller = await self.know(secret)
        self._bucket(caller).take(caller.tenant)
        return caller

    async def know(self, secret: str | None) -> Caller:
        """The caller of a token, without counting a request; refuses an unknown one."""
        if not secret:
            raise _unknown("a request must bring a token, got none")
        found = self._known.get(secret)
        if found is None or found[0] <= self._clock():
            caller = await run_in_threadpool(self._find, secret)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[secret] = (self._clock() + KNOWN_S, caller)
        return found[1]

    def _find(self, secret: str) -> Caller:
        token: Token | None = self._store.tokens.find(secret)
        if token is None:
            raise _unknown("a token must be one of the service's and not revoked, got another one")
        return Caller(
            token.tenant, token.scopes, token.id, self._store.tenants.limits(token.tenant)
        )

    def _bucket(self, caller: Caller) -> Bucket:
        rate = caller.limits.requests_per_s
        bucket = self._buckets.get(caller.tenant)
        if bucket is None or bucket.rate_per_s != rate:
            bucket = self._buckets[caller.tenant] = Bucket(rate, self._clock)
        return bucket


def secret_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The token that a request brings, from its headers as they came."""
    scheme, _, word = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and word.strip():
        return word.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1") or None


async def caller(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None,
    api_key: Annotated[str | None, Security(_API_KEY)] = None,
) -> Caller:
    """Whoever asks with a token, of any scope."""
    gate: Gate = request.app.state.service.gate
    return await gate.admit(bearer.credentials if bearer is not None else api_key)


def _needs(scope: str) -> Callable[..., Awaitable[Caller]]:
    async def check(found: Annotated[Caller, Depends(caller)]) -> Caller:
        if not found.may(scope):
            raise ApiError(
                403, f"a token must have the scope {scope} for this, got {', '.join(found.scopes)}"
            )
        return found

    return check


Reader = Annotated[Caller, Depends(_needs("read"))]
"""A caller that may look at its tenant's jobs and files."""
Submitter = Annotated[Caller, Depends(_needs("submit"))]
"""A caller that may send, change and end its tenant's."""
Admin = Annotated[Caller, Depends(_needs("admin"))]
"""A caller that may see all tenants."""
Scraper = Annotated[Caller, Depends(_needs("scrape"))]
"""A caller that may read the service's figures."""


def _unknown(message: str) -> ApiError:
    return ApiError(
        401,
        f"{message}: send `Authorization: Bearer TOKEN` with one of `tlora token create`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
