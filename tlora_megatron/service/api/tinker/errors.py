"""Why a client is refused, and the status and body that the `tinker` client expects."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.training.driven.requests import RequestError


class WireError(ValueError):
    """A body that is no request: cut off, of another type, or too large when unpacked."""


class UnknownId(ValueError):
    """An id that nothing has, or nothing of the caller's."""


class NotSigned(ValueError):
    """An address that this service has not signed, or whose time is over."""


class Refused(ValueError):
    """A request that is one of Tinker's, but wrong, or not done by this service."""


class Gone(RuntimeError):
    """A session, model or answer that was there and is not any more."""


class OutOfRoom(RuntimeError):
    """A request for which the tenant, or the disk, has no room until others are done with."""


_STATUS: Mapping[type[Exception], int] = {
    UnknownId: 404,
    NotSigned: 401,
    Gone: 410,
    WireError: 400,
    RequestError: 422,
    Refused: 422,
    OutOfRoom: 402,  # the client waits up to an hour with it, and says why
}
"""The status that tells a client what to do: it tries 5xx and 429 again, others not."""
_REFUSALS: tuple[type[Exception], ...] = (*_STATUS, OSError)


def tinker_format(error: ApiError) -> Mapping[str, Any]:
    """The body of a refusal: the client shows it whole."""
    return {"error": error.message, "category": "user" if error.status < 500 else "server"}


class TinkerRoute(APIRoute):
    """A route whose errors of state and wire become refusals."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wraps the route."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(request)
            except _REFUSALS as error:
                raise _as_refusal(error) from error

        return handle


def _as_refusal(error: Exception) -> Exception:
    for kind, status in _STATUS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(402, "the service's disk must have room for requests, got none left")
    return error
