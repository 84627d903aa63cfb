"""Why a client is refused, apart from how it is told over HTTP."""

from __future__ import annotations


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
