"""A store: all that a service knows, in one database; how it is opened and brought up to date."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event, inspect, make_url, select, update
from sqlalchemy.exc import ArgumentError

from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Database, to_json, turns_at
from tlora_megatron.service.store.events import Boards, Decisions, Events
from tlora_megatron.service.store.gangs import Commands, Gangs
from tlora_megatron.service.store.jobs import Jobs
from tlora_megatron.service.store.leases import ControllerLock, Leases
from tlora_megatron.service.store.rows import Snapshot
from tlora_megatron.service.store.states import StoreError, StoreUnreachable
from tlora_megatron.service.store.tenants import Sessions, Tenants, Tokens, Uploads

BUSY_S = 30
"""Seconds that a writer waits for its turn."""
CHECKPOINT_S = 10
"""Seconds that it waits for those who do not take turns: SQLite cleans up when a process leaves."""
_ANSWER_S = 30
"""Seconds after which a server that says nothing is taken for unreachable."""
IDLE_S = 60
"""Seconds that a transaction may do nothing: a process that hangs in one would stop all others."""
_NAMESPACE = "tlora"
"""PostgreSQL's schema that holds the tables."""
_TURN = "SELECT pg_advisory_xact_lock(7814906253)"
"""One number for all stores: advisory locks belong to one database of a server."""
_SHARED_DISKS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs")


class ServerClock:
    """The clock of a database's server: hosts whose own clocks disagree share it.

    It is asked for the time once a connection; in between this host's clock goes on.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self._ahead_s

    def ask(self, cursor: Any) -> None:
        """Sets the clock by the server of a connection."""
        before_s = time.time()
        cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
        (server_s,) = cursor.fetchone()
        self._ahead_s = server_s - (before_s + time.time()) / 2


def open_database(place: str | Path, clock: Callable[[], float] | None = None) -> Database:
    """Opens a file for SQLite, or `postgresql+psycopg://user@host/database`.

    Args:
        clock: gives the time that rows get; None: this host's, or that of PostgreSQL's server.

    Raises:
        ValueError: if it is neither.
        StoreUnreachable: if the file cannot be used.
    """
    if "://" not in str(place):
        return _sqlite(Path(place).expanduser().absolute(), clock or time.time)
    try:
        url = make_url(str(place))
    except (ArgumentError, ValueError):
        # The text may hold a password.
        raise ValueError(
            "the store must be a file or postgresql+psycopg://user@host/database, got a URL that "
            "cannot be read"
        ) from None
    if url.get_backend_name() == "postgresql":
        return _postgres(url.set(drivername="postgresql+psycopg"), clock)
    raise ValueError(
        f"the store must be a file or postgresql+psycopg://..., got {url.get_backend_name()}://..."
    )


def _sqlite(path: Path, clock: Callable[[], float]) -> Database:
    _check_disk(path)
    _make_private(path)

    def prepare(connection: sqlite3.Connection, _: Any) -> None:
        # Transactions are begun by `_begin`, not by the module.
        connection.isolation_level = None
        for setting in (
            f"busy_timeout = {1000 * CHECKPOINT_S}",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {setting}")

    url = URL.create("sqlite", database=str(path))
    # As many as HTTP has threads: others are opened and closed every time.
    options: dict[str, Any] = {"pool_size": 40, "connect_args": {"timeout": CHECKPOINT_S}}
    writer = create_engine(url, json_serializer=to_json, **options)
    event.listen(writer, "connect", prepare)
    event.listen(writer, "begin", _begin)
    reader = writer.execution_options(tlora_reads=True)
    # SQLite alone sleeps ever longer between tries: of eight busy writers one waited 2.7 s.
    turn = turns_at(path.with_name(f"{path.name}-turn"), BUSY_S)
    return Database(writer, reader, place=f"the store {path}", clock=clock, turn=turn)


def _begin(connection: Connection) -> None:
    reads = connection.get_execution_options().get("tlora_reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _make_private(path: Path) -> None:
    """Makes the file, readable by its owner alone; SQLite gives its other files the same mode."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnreachable(
            f"the store must be a file that can be opened, got {error.strerror}: {path}"
        ) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise StoreUnreachable(
                f"the store must be a file of user {os.geteuid()}, got {path} of user "
                f"{found.st_uid}"
            )
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _check_disk(path: Path) -> None:
    """Refuses a disk that several hosts share: SQLite's WAL needs memory that they do not."""
    kind = disk_kind(path.parent)
    if kind.startswith(_SHARED_DISKS):
        raise StoreUnreachable(
            f"the store must lie on a disk of this host, got {path} on {kind}: name a folder "
            "elsewhere, or give a PostgreSQL URL"
        )


def disk_kind(folder: Path, table: Path = Path("/proc/self/mountinfo")) -> str:
    """Type of the file system below a folder, as the kernel calls it; empty if unknown."""
    try:
        real = folder.resolve()
        best, kind = Path(), ""
        for line in table.read_text().splitlines():
            left, _, right = line.partition(" - ")
            mount = Path(left.split()[4].encode().decode("unicode_escape"))
            if real.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
                best, kind = mount, right.split()[0]
    except (OSError, IndexError, ValueError):
        return ""
    return kind


def _postgres(url: URL, given: Callable[[], float] | None) -> Database:
    clock = ServerClock()
    tables.suit_postgres()

    def prepare(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            for setting in (
                f"search_path TO {_NAMESPACE}",
                "synchronous_commit TO on",
                f"lock_timeout TO '{BUSY_S}s'",
                f"idle_in_transaction_session_timeout TO '{IDLE_S}s'",
            ):
                cursor.execute(f"SET {setting}")
            clock.ask(cursor)
        connection.commit()

    try:
        writer = create_engine(
            url,
            json_serializer=to_json,
            pool_pre_ping=True,
            connect_args={"connect_timeout": _ANSWER_S, "keepalives_idle": _ANSWER_S},
        )
    except ImportError as error:
        raise ImportError(
            "a store on PostgreSQL needs psycopg: pip install 'tlora-megatron[postgres]'"
        ) from error
    event.listen(writer, "connect", prepare)
    reader = writer.execution_options(isolation_level="REPEATABLE READ")
    shown = url.set(query={}).render_as_string(hide_password=True)
    place = f"the store {shown}"
    return Database(writer, reader, place=place, clock=given or clock, statement=_TURN)


def _add_board(connection: Connection) -> None:
    tables.board.create(connection)
    for table, name in ((tables.gang, "gang_by_end"), (tables.lease, "lease_by_end")):
        next(index for index in table.indexes if index.name == name).create(connection)


def _let_jobs_be_removed(connection: Connection) -> None:
    kind = tables.job.c.removed_at.type.compile(connection.dialect)
    connection.exec_driver_sql(f"ALTER TABLE job ADD COLUMN removed_at {kind}")
    connection.exec_driver_sql("ALTER TABLE job DROP COLUMN folder")


STEPS: Sequence[Callable[[Connection], None]] = (
    _add_board,
    partial(tables.metadata.create_all, tables=tables.TENANCY),
    partial(tables.metadata.create_all, tables=tables.TINKER),
    _let_jobs_be_removed,
)
"""Step k brings version k + 1 to k + 2. A change of `tables` needs a step that does the same to a
store that exists."""


def newest() -> int:
    """The version of `tables`."""
    return 1 + len(STEPS)


def bring_up(database: Database) -> None:
    """Makes the tables of an empty database, or changes older ones; refuses newer ones."""
    with database.read() as connection:
        if version_of(connection) == newest():
            return
    with database.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {_NAMESPACE}")
        version = version_of(connection)
        if version is None:
            tables.metadata.create_all(connection)
            connection.execute(tables.schema_version.insert().values(version=newest()))
            return
        if version > newest():
            raise StoreError(
                f"{database.place} must have tables of version {newest()} or older, got {version}: "
                "a newer tlora-megatron made them; install that one, or name another store"
            )
        for step in STEPS[version - 1 :]:
            step(connection)
        connection.execute(update(tables.schema_version).values(version=newest()))


def version_of(connection: Connection) -> int | None:
    """The version of the tables; None before there are any."""
    if not inspect(connection).has_table(tables.schema_version.name):
        return None
    return connection.execute(select(tables.schema_version.c.version)).scalar_one()


class Store(AbstractContextManager["Store"]):
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
        self.database.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(place: str | Path, *, clock: Callable[[], float] | None = None) -> Store:
    """Opens a store as `open_database` does, or makes it; a `StoreError` if it cannot be."""
    database = open_database(place, clock)
    try:
        bring_up(database)
    except BaseException:
        database.close()
        raise
    return Store(database)
