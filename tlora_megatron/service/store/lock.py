"""The controller's lock: one controller at a time writes a store."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from sqlalchemy import delete, update

from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Database
from tlora_megatron.service.store.errors import LockHeld, LockLost
from tlora_megatron.service.store.rows import Lock
from tlora_megatron.service.store.tables import find_one, query_of, values_of

STALE_S = 15.0
"""A controller of another host that gave no sign of life for so long is taken for dead."""


class ControllerLock:
    """Taken by a controller; from then on every write of this store is made under it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, *, stale_s: float = STALE_S) -> int:
        """Takes the lock; returns its epoch, which grows with every taking.

        A dead process of this host loses it at once, any other after `stale_s` without a beat.

        Raises:
            LockHeld: if another controller runs.
        """
        self._database.fence = None
        with self._database.write() as connection:
            now = self._database.clock()
            held = self.holder()
            if held is not None and not _is_gone(held, now, stale_s):
                raise LockHeld(
                    f"{self._database.place} must have one controller, got {held.who}, which "
                    f"gave a sign of life {now - held.beat_at:.0f} s ago: stop that one first"
                )
            epoch = 1 if held is None else held.epoch + 1
            connection.execute(delete(tables.controller))
            lock = Lock(epoch=epoch, owner=owner(), beat_at=now)
            connection.execute(tables.controller.insert(), {**values_of(lock), "id": 1})
        self._database.fence = epoch
        return epoch

    def beat(self) -> None:
        """Gives a sign of life.

        Raises:
            LockLost: if another controller has taken over.
        """
        with self._database.write() as connection:
            if self._database.fence is None:
                raise LockLost(f"a controller must take the lock of {self._database.place} first")
            now = self._database.clock()
            connection.execute(update(tables.controller).values(beat_at=now))

    def release(self) -> None:
        """Gives the lock back, so that another controller need not wait."""
        if self._database.fence is not None:
            with self._database.write() as connection:
                connection.execute(update(tables.controller).values(owner="", beat_at=0.0))
        self._database.fence = None

    def holder(self) -> Lock | None:
        """Who took the lock last; the owner is empty if it was given back."""
        with self._database.read() as connection:
            return find_one(connection, Lock, query_of(Lock))

    def is_held(self, *, stale_s: float = STALE_S) -> bool:
        """True if a controller runs, by its last sign of life."""
        held = self.holder()
        return held is not None and not _is_gone(held, self._database.clock(), stale_s)


def owner() -> str:
    """Names this process: no other of its host, before or after it, has the same name."""
    return json.dumps(
        {"host": socket.gethostname(), "pid": os.getpid(), **_host(), "start": _start(os.getpid())}
    )


def _is_gone(lock: Lock, now: float, stale_s: float) -> bool:
    if not lock.owner or now - lock.beat_at > stale_s:
        return True
    try:
        held: dict[str, Any] = json.loads(lock.owner)
        same_host = all(held[name] == value for name, value in _host().items())
        return same_host and _start(held["pid"]) != held["start"]
    except (ValueError, KeyError, TypeError):
        return False


def _host() -> dict[str, str]:
    """Returns an id that two processes share if they can see each other by their numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "pids": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"boot": "", "pids": socket.gethostname()}


def _start(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty if it is gone or a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in "ZX" else words[19]
