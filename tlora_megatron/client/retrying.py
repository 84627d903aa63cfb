"""When a request is sent again, and how long to wait before."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import httpx

from tlora_megatron.client.errors import ServiceError, Unreachable

logger = logging.getLogger(__name__)

FAILURES = (httpx.TransportError, ServiceError)
"""Exceptions that an attempt may end with."""
_PASSING = (429, 502, 503, 504)
"""Statuses of a service that may answer otherwise soon."""
_LONGEST_ASKED_S = 60.0
_FIRST_S, _LONGEST_S = 0.25, 8.0


def waits(retries: int, random_share: float = 0.5) -> Iterator[float]:
    """Seconds to wait before each retry: longer and longer, and unlike those of other clients."""
    for attempt in range(retries):
        whole = min(_LONGEST_S, _FIRST_S * 2**attempt)
        yield whole * (1 - random_share * random.random())


def refusal(answer: httpx.Response) -> ServiceError:
    """The error of an answer whose body has been read."""
    try:
        found = answer.json()["error"]
        message, param = str(found["message"]), found.get("param")
    except (ValueError, TypeError, KeyError, AttributeError):
        message, param = f"the service must answer, got status {answer.status_code}", None
    return ServiceError(answer.status_code, message, param, _asked_wait_s(answer))


def may_pass(error: Exception) -> bool:
    """True of what another attempt may mend."""
    return not isinstance(error, ServiceError) or error.status in _PASSING


def wait_s(planned: float, error: Exception) -> float:
    """Seconds to wait behind an error."""
    return max(planned, error.wait_s) if isinstance(error, ServiceError) else planned


def tell_silence(address: str, error: Exception) -> None:
    """Says in the log that nothing answers, before a request is sent again; refusals are none."""
    if not isinstance(error, ServiceError):
        logger.warning(
            "nothing answers at %s (%s); it is asked again for some seconds. Is the address right, "
            "and does `tlora serve --http` run there?",
            address,
            error,
        )


def given_up(address: str, error: Exception) -> Exception:
    """The error when all attempts have failed."""
    if isinstance(error, ServiceError):
        return error
    told = str(error) or type(error).__name__
    return Unreachable(
        f"the service must answer at {address}, got {told}; check the address, or start one there "
        "with: tlora serve --http PORT"
    )


def _asked_wait_s(answer: httpx.Response) -> float:
    try:
        return min(float(answer.headers.get("retry-after", 0)), _LONGEST_ASKED_S)
    except ValueError:
        return 0.0
