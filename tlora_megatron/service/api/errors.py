"""Refusals over HTTP: a status and a sentence, in the format that a client's library expects."""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from fastapi.responses import JSONResponse

from tlora_megatron.config.reader import ConfigError, show
from tlora_megatron.service.store import (
    IllegalChange,
    KeyReused,
    NameTaken,
    NotFound,
    OverLimit,
    StoreBusy,
    StoreError,
    StoreFull,
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
}
"""Sentences instead of the store's, which name paths of the service's host."""


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


def install(app: FastAPI, formats: Mapping[str, Format]) -> None:
    """Lets an app answer all errors in sentences, by beginnings of paths; others are native."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        found = as_api_error(error)
        body = format_of(formats, request.url.path)(found)
        return JSONResponse(body, found.status, headers=found.headers)

    for kind in (ApiError, StoreError, ValueError, RequestValidationError, StarletteHTTPException):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, answer)


def as_api_error(error: Exception) -> ApiError:
    """The refusal that an error means to a client; one that is a mistake of ours names a number."""
    if isinstance(error, ApiError):
        return error
    for kind, status in _KEPT.items():
        if isinstance(error, kind):
            return ApiError(status, str(error))
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, StarletteHTTPException):
        return _of_http(error)
    number = secrets.token_hex(4)
    logger.error("request failed (%s)", number, exc_info=error)
    for known, (status, sentence) in _OWN_WORDS.items():
        if isinstance(error, known):
            return ApiError(status, sentence, headers={"Retry-After": "5"})
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "the service's disk must have room; free some and try again")
    if isinstance(error, StoreError):
        return ApiError(503, "the service's store cannot be used now; try again later")
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
