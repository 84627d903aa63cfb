"""Lets known tokens in, for what they allow, and refuses in sentences, as a client expects them."""

from __future__ import annotations

import errno
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import ClientDisconnect

from tlora_megatron.config.reader import ConfigError, show
from tlora_megatron.service.store import (
    IllegalChange,
    KeyReused,
    NameTaken,
    NotFound,
    OverLimit,
    Store,
    StoreBusy,
    StoreError,
    StoreFull,
    TenantLimits,
    Token,
)

logger = logging.getLogger(__name__)

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""Status -> the word for programs; other ones are `invalid_request_error` or `server_error`."""
_KEPT: Mapping[type[Exception], int] = {
    **dict.fromkeys((KeyReused, NameTaken, IllegalChange), 409),
    **{NotFound: 404, OverLimit: 429, ConfigError: 400},
}
_OWN_WORDS = {
    StoreFull: (507, "the service's disk must have room: nothing of this change was kept"),
    StoreBusy: (503, "the service's store is busy: nothing of this change was kept; try again"),
    StoreError: (503, "the service's store cannot be used now; try again later"),
}
"""Sentences instead of the store's, which name paths of the service's host."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ApiError(Exception):
    """A request that is refused. Raise it anywhere below a route."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Takes a status, `<name> must <rule>, got <value>`, the wrong field, a programs' word."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """The word for programs that belongs to the status."""
        return TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )


Format = Callable[[ApiError], Mapping[str, Any]]
"""Makes the body of an answer from an error."""


def native_format(error: ApiError) -> Mapping[str, Any]:
    """The body that our own client and OpenAI's expect."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def format_of(formats: Mapping[str, Format], path: str) -> Format:
    """The format of errors below a path: that of the longest beginning that is named."""
    prefix = max((known for known in formats if path.startswith(known)), key=len, default=None)
    return native_format if prefix is None else formats[prefix]


def refused(name: str, rule: str, got: Any, remedy: str = "", *, status: int = 400) -> ApiError:
    """The error `<name> must <rule>, got <got>; <remedy>`."""
    sentence = f"{name} must {rule}, got {show(got)}" + (f"; {remedy}" if remedy else "")
    return ApiError(status, sentence, param=name)


def missing(what: str, got: str) -> ApiError:
    """The error for an id that is not there, or is another tenant's."""
    return refused(what, "be one of yours", got, status=404)


def too_many_streams(most: int) -> ApiError:
    return ApiError(
        429,
        f"streams of a tenant must be {most} at most, got one more: close some",
        headers={"Retry-After": "5"},
    )


def install(app: FastAPI, formats: Mapping[str, Format]) -> None:
    """Lets an app answer all errors in sentences, by beginnings of paths; others are native."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        found = as_api_error(error)
        body = format_of(formats, request.url.path)(found)
        return JSONResponse(body, found.status, headers=found.headers)

    known = (ApiError, StoreError, ValueError, RequestValidationError, StarletteHTTPException)
    # What is a mistake of ours is also told, with a trace, by the framework.
    for kind in (*known, ClientDisconnect, OSError, Exception):
        app.add_exception_handler(kind, answer)


def as_api_error(error: Exception) -> ApiError:
    """The refusal that an error means to a client; one that is a mistake of ours names a number."""
    if isinstance(error, ApiError):
        return error
    for kind, status in _KEPT.items():
        if isinstance(error, kind):
            return ApiError(status, str(error))
    if isinstance(error, ClientDisconnect):
        return ApiError(400, "the body must come whole, got a client that went away")
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, StarletteHTTPException):
        return _of_http(error)
    if isinstance(error, OSError) and error.errno in _FULL:
        error = StoreFull(str(error))
    for known, (status, sentence) in _OWN_WORDS.items():
        if isinstance(error, known):
            logger.warning("a request is refused: %s", error)
            return ApiError(status, sentence, headers={"Retry-After": "5"})
    number = secrets.token_hex(4)
    logger.error("request failed (%s)", number, exc_info=error)
    return ApiError(500, f"the service failed; its log says more under number {number}")


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first mistake that pydantic found, in our words."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    name = ".".join(place[1:]) or place[0]
    if first["type"] == "missing":
        return ApiError(400, f"{name} must be given", param=name)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body must be JSON: {first.get('ctx', {}).get('error', '')}")
    message = f"{name} is refused: {first['msg']}, got {show(first.get('input'))}"
    return ApiError(400, message, param=name)


def _of_http(error: StarletteHTTPException) -> ApiError:
    words = {
        404: "the path must be one of the service's: /docs lists them",
        405: "the path must be asked with another method: /docs lists them",
    }
    return ApiError(
        error.status_code, words.get(error.status_code, str(error.detail)), headers=error.headers
    )


_BURST_S = 4.0
"""Seconds of the rate that a tenant may spend at once."""


class Bucket:
    """Counts one tenant's requests."""

    def __init__(self, rate_per_s: float) -> None:
        self.rate_per_s = rate_per_s
        self._most = max(1.0, rate_per_s * _BURST_S)
        self._room = self._most if rate_per_s else 0.0
        self._at = time.monotonic()

    def take(self, tenant: str) -> None:
        """Takes one request; refuses one too many with the seconds after which there is room."""
        now = time.monotonic()
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
        return scope in self.scopes or self.is_admin


class Gate:
    """Knows tokens for a second, so that a request costs no read of the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[float, Caller]] = {}
        self._buckets: dict[str, Bucket] = {}

    async def admit(self, secret: str | None) -> Caller:
        """The caller of a token; refuses an unknown one, and a tenant that asks too often."""
        caller = await self.know(secret)
        rate = caller.limits.requests_per_s
        bucket = self._buckets.get(caller.tenant)
        if bucket is None or bucket.rate_per_s != rate:
            bucket = self._buckets[caller.tenant] = Bucket(rate)
        bucket.take(caller.tenant)
        return caller

    async def know(self, secret: str | None) -> Caller:
        """The caller of a token, without counting a request; refuses an unknown one."""
        if not secret:
            raise _unknown("a request must bring a token, got none")
        found = self._known.get(secret)
        if found is None or found[0] <= time.monotonic():
            caller = await run_in_threadpool(self._find, secret)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[secret] = (time.monotonic() + KNOWN_S, caller)
        return found[1]

    def _find(self, secret: str) -> Caller:
        token: Token | None = self._store.tokens.find(secret)
        if token is None:
            raise _unknown("a token must be one of the service's and not revoked, got another one")
        return Caller(
            token.tenant, token.scopes, token.id, self._store.tenants.limits(token.tenant)
        )


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
Scraper = Annotated[Caller, Depends(_needs("scrape"))]
"""A caller that may read the service's figures."""


def _unknown(message: str) -> ApiError:
    return ApiError(
        401,
        f"{message}: send `Authorization: Bearer TOKEN` with one of `tlora token create`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
