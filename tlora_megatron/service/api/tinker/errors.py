"""Refusals as the `tinker` client expects them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.service.api.tinker.refusals import (
    Gone,
    NotSigned,
    OutOfRoom,
    Refused,
    UnknownId,
    WireError,
)
from tlora_megatron.training.driven.requests import RequestError

_REFUSALS = (
    *(UnknownId, NotSigned, Gone, WireError, RequestError, Refused, OutOfRoom),
    OSError,
)


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
                raise as_refusal(error) from error

        return handle


def as_refusal(error: Exception) -> Exception:
    """The status that tells a client what to do: it tries 5xx and 429 again, others not."""
    if isinstance(error, UnknownId):
        return ApiError(404, str(error))
    if isinstance(error, NotSigned):
        return ApiError(401, str(error))
    if isinstance(error, Gone):
        return ApiError(410, str(error))
    if isinstance(error, WireError):
        return ApiError(400, str(error))
    if isinstance(error, RequestError | Refused):
        return ApiError(422, str(error))
    # The client waits up to an hour with 402, and says why.
    if isinstance(error, OutOfRoom):
        return ApiError(402, str(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(402, "the service's disk must have room for requests, got none left")
    return error
