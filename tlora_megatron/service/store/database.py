"""Transactions on a store's database: one writer at a time, every commit on the disk.

All changes of a store, on SQLite and PostgreSQL alike, take turns: SQLite by `BEGIN IMMEDIATE`,
PostgreSQL by an advisory lock until the commit. What a transaction has read therefore stays true
until it ends, and events appear in the order of their numbers.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Executable, select
from sqlalchemy.exc import DBAPIError, InternalError, OperationalError

from tlora_megatron.service.store import tables
from tlora_megatron.service.store.states import (
    LockLost,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from tlora_megatron.service.store.tables import Row

Turn = Callable[[], AbstractContextManager[None]]
"""Entered by a writer; others wait meanwhile."""
_FULL = ("SQLITE_FULL", "53100")
_DAMAGED = ("SQLITE_NOTADB", "SQLITE_CORRUPT")
_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED", "55P03")


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def to_json(value: Any) -> str:
    """The value as JSON that every database takes: numbers that are not finite become null."""
    try:
        return _encode(value)
    except ValueError:
        return _encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


class Database:
    """Connections to one store; used by any thread of the process that opened it."""

    def __init__(
        self,
        writer: Engine,
        reader: Engine,
        *,
        place: str,
        clock: Callable[[], float],
        turn: Turn = nullcontext,
        statement: str | None = None,
    ) -> None:
        """Takes engines that are set up.

        Args:
            reader: each of its transactions sees one state of the store throughout.
            place: the store in messages, without a password.
            turn: entered by a writer before it begins, so that those who wait do so in peace.
            statement: waits until no other transaction writes; None where beginning does.
        """
        self.place = place
        self.clock = clock
        self.fence: int | None = None
        """Epoch of the controller's lock that this object writes under; None: not a controller."""
        self.writer = writer
        """The engine whose transactions may write."""
        self._reader = reader
        self._turn = turn
        self._statement = statement
        self._process = os.getpid()
        self._local = threading.local()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is kept whole or not at all; one inside another joins it.

        A writer checks all there is to check first: what refuses inside a transaction has
        changed nothing, and the transaction may go on.

        Raises:
            StoreError: if it cannot be kept.
        """
        outer = self._outer()
        if outer is not None:
            if not self._local.writes:
                raise StoreError("a change of a store must not be made inside a read")
            with self._inside():
                yield outer
            return
        with self._sentences(), self._turn(), self.writer.begin() as connection:
            if self._statement is not None:
                connection.exec_driver_sql(self._statement)
            self._check_fence(connection)
            with self._joined(connection, writes=True):
                yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A view of one state of the store; inside a transaction or view, of that one's."""
        outer = self._outer()
        if outer is not None:
            with self._inside():
                yield outer
            return
        with (
            self._sentences(),
            self._reader.begin() as connection,
            self._joined(connection, writes=False),
        ):
            yield connection

    def all(self, row: type[Row], query: Executable) -> list[Row]:
        """The rows that a query finds."""
        with self.read() as connection:
            return tables.find_all(connection, row, query)

    def first(self, row: type[Row], query: Executable) -> Row | None:
        """The first row that a query finds."""
        with self.read() as connection:
            return tables.find_one(connection, row, query)

    def execute(self, statement: Executable, rows: Sequence[Mapping[str, Any]] = ()) -> int:
        """Makes one change, for each of the rows if there are some; returns how many it met."""
        with self.write() as connection:
            return connection.execute(statement, rows or None).rowcount

    def close(self) -> None:
        """Closes the connections; in a forked child it only forgets them."""
        self.writer.dispose(close=os.getpid() == self._process)

    def _outer(self) -> Connection | None:
        """The transaction that this thread is in."""
        if os.getpid() != self._process:
            raise StoreError(
                f"a store must be opened by the process that uses it, got {self.place} opened by "
                f"process {self._process} in process {os.getpid()}: open it after the fork"
            )
        return getattr(self._local, "connection", None)

    @contextmanager
    def _joined(self, connection: Connection, *, writes: bool) -> Iterator[None]:
        local = self._local
        local.connection, local.writes, local.is_broken = connection, writes, False
        try:
            yield
            self._check_whole()
        finally:
            local.connection = None

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """A part of a transaction, which is lost whole if the database gives up."""
        self._check_whole()
        with self._sentences():
            try:
                yield
            except DBAPIError:
                self._local.is_broken = True
                raise

    def _check_whole(self) -> None:
        if self._local.is_broken:
            raise StoreError(
                f"a transaction of {self.place} must end with its first error of the database, got "
                "another call: nothing of it was kept"
            )

    def _check_fence(self, connection: Connection) -> None:
        if self.fence is None:
            return
        epoch = connection.execute(select(tables.controller.c.epoch)).scalar()
        if epoch != self.fence:
            raise LockLost(
                f"a controller must hold the lock of {self.place} to write, got epoch "
                f"{self.fence} where {epoch} is the present one: another controller took over"
            )

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raised = _sentence(error, self.place)
            if raised is None:
                raise
            raise raised from error


class Part:
    """A part of a store."""

    def __init__(self, database: Database) -> None:
        self._database = database


def _sentence(error: DBAPIError, place: str) -> StoreError | None:
    """The error in a user's words; None for one that is our own mistake."""
    found = error.orig
    code = str(getattr(found, "sqlite_errorname", None) or getattr(found, "sqlstate", None) or "")
    said = str(found).strip()
    if code.startswith(_FULL):
        return StoreFull(
            f"the disk of {place} must have room, got {said!r}: nothing of this change was kept; "
            "free some space and try again"
        )
    if code.startswith("SQLITE_IOERR"):
        return StoreFull(
            f"the disk of {place} must take writes, got {said!r} ({code}): nothing of this change "
            "was kept; it is full, over its quota, or broken: free some space and try again"
        )
    if code.startswith(_BUSY):
        return StoreBusy(
            f"{place} must become free within the time this process waits, got {said!r}: another "
            "process holds it; try again, and look for a stopped one"
        )
    if code.startswith(_DAMAGED):
        return StoreUnreachable(
            f"{place} must be a whole SQLite database, got {said!r}: put a copy in its place, or "
            "take another folder; checkpoints and adapters are in the jobs' folders"
        )
    if isinstance(error, OperationalError | InternalError):
        return StoreUnreachable(f"{place} must be a store that can be reached, got {said!r}")
    return None


def turns_at(path: Path, wait_s: float) -> Turn:
    """Turns that the threads and processes of a host take at a file, which is made.

    A turn ends with its process. One that does not come in `wait_s` is not waited for any longer:
    these turns are a courtesy, the database has its own lock.
    """

    @contextmanager
    def turn() -> Iterator[None]:
        # Opened for each turn: threads that share an open file would share its lock.
        file = _File(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        try:
            file.lock(wait_s)
            yield
        finally:
            file.close()

    return turn


class _File:
    """An open file with a lock that can be waited for with a limit, which flock has not."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waits = False
        self._is_over = False
        self._guard = threading.Lock()

    def lock(self, wait_s: float) -> None:
        """Locks the file, or gives up when the time is over."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._waits = True
            waiter = threading.Thread(target=self._wait, daemon=True)
            waiter.start()
            waiter.join(wait_s)

    def close(self) -> None:
        """Ends the turn; a thread that still waits for the lock closes the file when it is done."""
        with self._guard:
            self._is_over = True
            if not self._waits:
                os.close(self._descriptor)

    def _wait(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        finally:
            with self._guard:
                self._waits = False
                if self._is_over:
                    os.close(self._descriptor)
