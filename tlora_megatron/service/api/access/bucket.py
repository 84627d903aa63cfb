"""A bucket of requests that fills at a steady rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from tlora_megatron.service.api.errors import ApiError

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
        """Takes one request.

        Raises:
            ApiError: 429, with the seconds after which there is room again.
        """
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
