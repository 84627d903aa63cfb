"""A store: all that a service knows, in one database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tlora_megatron.service.store.database import Database
from tlora_megatron.service.store.events import Boards, Decisions, Events
from tlora_megatron.service.store.gangs import Commands, Gangs
from tlora_megatron.service.store.jobs import Jobs
from tlora_megatron.service.store.leases import Leases
from tlora_megatron.service.store.lock import ControllerLock
from tlora_megatron.service.store.opening import bring_up, open_database
from tlora_megatron.service.store.rows import Snapshot
from tlora_megatron.service.store.sessions import Sessions
from tlora_megatron.service.store.tenants import Tenants, Tokens, Uploads


class Store:
    """All that a service knows. Any thread of one process may use it, but no forked child."""

    def __init__(self, database: Database) -> None:
        self.database = database
        """The database that all parts of the store read and write."""
        self.jobs = Jobs(database)
        self.gangs = Gangs(database)
        self.commands = Commands(database)
        self.leases = Leases(database)
        self.events = Events(database)
        self.decisions = Decisions(database)
        self.boards = Boards(database)
        self.lock = ControllerLock(database)
        self.tenants = Tenants(database)
        self.tokens = Tokens(database)
        self.uploads = Uploads(database)
        self.sessions = Sessions(database)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes the calls of this thread inside it one change: kept whole or not at all.

        A call that refuses inside has changed nothing: if its error is caught, the others are kept.
        """
        with self.database.write():
            yield

    @contextmanager
    def part(self) -> Iterator[None]:
        """Makes the calls inside it one part of a transaction: an error takes back these alone."""
        with self.database.write() as connection, connection.begin_nested():
            yield

    def load(self) -> Snapshot:
        """All that a controller needs to take up where another stopped, of one moment."""
        with self.database.read():
            return Snapshot(
                jobs=self.jobs.unfinished_rows(),
                gangs=self.gangs.live(),
                commands=self.commands.unapplied(),
                leases=self.leases.all(),
                last_event=self.events.last(),
            )

    def close(self) -> None:
        """Closes the store."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_store(place: str | Path, *, clock: Callable[[], float] | None = None) -> Store:
    """Opens a store and makes it if it is not there.

    Args:
        place: A file for SQLite on this host, or `postgresql+psycopg://user@host/database`.
        clock: Gives the time that rows get, in Unix seconds; None: this host's, or that of
            PostgreSQL's server, which all its hosts share.

    Raises:
        ValueError: if it is neither.
        StoreError: if it cannot be opened, or a newer version of the package made it.
    """
    database = open_database(place, clock)
    try:
        bring_up(database)
    except BaseException:
        database.close()
        raise
    return Store(database)
