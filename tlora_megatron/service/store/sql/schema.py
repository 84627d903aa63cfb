"""Versions of the tables, and how a store of an older one is brought up to this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Connection, inspect, select, update

from tlora_megatron.service.store.errors import StoreError
from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database

Step = Callable[[Connection], None]


def _add_board(connection: Connection) -> None:
    tables.board.create(connection)
    for table, name in ((tables.gang, "gang_by_end"), (tables.lease, "lease_by_end")):
        next(index for index in table.indexes if index.name == name).create(connection)


def _add_tenancy(connection: Connection) -> None:
    tables.metadata.create_all(connection, tables=tables.TENANCY)


STEPS: Sequence[Step] = (_add_board, _add_tenancy)
"""Step k brings version k + 1 to k + 2. Whoever changes `tables` adds the step that does the same
to a store that exists."""


def newest() -> int:
    """The version of `tables`."""
    return 1 + len(STEPS)


def bring_up(database: Database, make_namespace: Step) -> None:
    """Makes the tables of an empty database, or changes those of an older version.

    Raises:
        StoreError: if a newer version of the package made them.
    """
    with database.read() as connection:
        if _version(connection) == newest():
            return
    with database.write() as connection:
        make_namespace(connection)
        version = _version(connection)
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


def _version(connection: Connection) -> int | None:
    if not inspect(connection).has_table(tables.schema_version.name):
        return None
    return connection.execute(select(tables.schema_version.c.version)).scalar_one()
