"""The errors of a store: changes that it refuses and things that it cannot do, each a sentence."""

from __future__ import annotations


class StoreError(RuntimeError):
    """The store cannot do what was asked; nothing of it was kept."""


class StoreFull(StoreError):
    """The disk below the store has no room."""


class StoreBusy(StoreError):
    """Other writers held the store for longer than this one waits."""


class StoreUnreachable(StoreError):
    """The store's file or server cannot be opened or does not answer."""


class Refusal(StoreError):
    """The request cannot be granted: asking again for the same is refused again."""


class NotFound(Refusal):
    """There is no such job, gang, command, token or file."""


class KeyReused(Refusal):
    """An idempotency key came again with another job."""


class NameTaken(Refusal):
    """An unfinished job of the tenant has the name already."""


class OverLimit(Refusal):
    """A tenant has as much as it may have."""


class IllegalChange(Refusal):
    """A job or gang must not change so from the state it is in."""


class LeaseHeld(StoreError):
    """Another gang may still write the job's folder."""


class LockHeld(StoreError):
    """Another controller runs on this store."""


class LockLost(StoreError):
    """Another controller has taken over; this one must not write any more."""
