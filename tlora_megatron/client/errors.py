"""The errors of a client: what a service refuses, and what keeps a client from it."""

from __future__ import annotations


class ServiceError(RuntimeError):
    """The service refused a request; the message is its sentence."""

    def __init__(
        self, status: int, message: str, param: str | None = None, wait_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """How long the service asks to wait before the next attempt."""
        self.status = status
        """Status code of HTTP."""
        self.param = param
        """The field or parameter that is wrong, if it is one."""


class Unreachable(RuntimeError):
    """The service did not answer, however often it was asked."""
