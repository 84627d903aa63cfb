"""What a store refuses or cannot do, each by a sentence."""

from __future__ import annotations


class StoreError(RuntimeError):
    """The store cannot do what was asked; nothing of it was kept."""


class StoreFull(StoreError):
    """The disk below the store has no room."""


class StoreBusy(StoreError):
    """Other writers held the store for longer than this one waits."""


class StoreUnreachable(StoreError):
    """The store's file or server cannot be opened or does not answer."""


class NotFound(StoreError):
    """There is no such job, gang or command."""


class KeyReused(StoreError):
    """An idempotency key came again with another job."""


class NameTaken(StoreError):
    """An unfinished job of the tenant has the name already."""


class IllegalChange(StoreError):
    """A job or gang must not change so from the state it is in."""


class EventGap(StoreError):
    """An event of a gang came before one that was told earlier."""


class LeaseHeld(StoreError):
    """Another gang may still write the job's folder."""


class LockHeld(StoreError):
    """Another controller runs on this store."""


class LockLost(StoreError):
    """Another controller has taken over; this one must not write any more."""
