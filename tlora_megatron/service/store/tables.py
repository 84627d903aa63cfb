"""Tables of a store, the same on SQLite and PostgreSQL, and how their rows are read as values.

A table has a column for each field of its row's class: the annotation gives the type, and `| None`
lets it be null. What is written here besides are keys, indexes, and columns that no value shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Executable,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Select,
    Table,
    Text,
    UniqueConstraint,
    cast,
    select,
    text,
)
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeDecorator, TypeEngine

from tlora_megatron.service.messages import Command, GangSpec
from tlora_megatron.service.store import rows
from tlora_megatron.service.store.states import OVER, NotFound

Row = TypeVar("Row")
Item = TypeVar("Item")

metadata = MetaData()
_BIG = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up by itself in a column of type INTEGER only, which holds 64 bits there."""
_JSON = JSON(none_as_null=True)
_TABLES: dict[type, Table] = {}
"""Class of a row -> its table."""
_NAMES: dict[type, tuple[str, ...]] = {}
"""Class of a row -> its fields that are columns."""
_MOST_PARAMETERS = 5000
"""SQLite takes 32,766 in a statement."""


class _Word(TypeDecorator[StrEnum]):
    """A word of an enumeration, as text."""

    impl = Text
    cache_ok = True

    def __init__(self, words: type[StrEnum]) -> None:
        super().__init__()
        self.words = words

    def process_bind_param(self, value: Any, dialect: object) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: Any, dialect: object) -> StrEnum | None:
        return None if value is None else self.words(value)


class _Spec(TypeDecorator[GangSpec]):
    """All that a gang is started with, as text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> str:
        return str(value.to_json())

    def process_result_value(self, value: Any, dialect: object) -> GangSpec:
        return GangSpec.from_json(value)


class _Tuple(TypeDecorator[tuple[Any, ...]]):
    """A tuple of plain values, as JSON."""

    impl = _JSON
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> list[Any]:
        return list(value)

    def process_result_value(self, value: Any, dialect: object) -> tuple[Any, ...]:
        return tuple(value)


_TYPES: Mapping[Any, TypeEngine[Any]] = {
    str: Text(),
    int: _BIG,
    float: Double(),
    bool: Boolean(),
    GangSpec: _Spec(),
    Literal: Text(),
    Mapping: _JSON,
    Sequence: _JSON,
    tuple: _Tuple(),
}


def _column(name: str, hint: Any, *, is_key: bool, counts: bool) -> Column[Any]:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (kind,) = (option for option in options if option is not NoneType)
    is_enum = isinstance(kind, type) and issubclass(kind, StrEnum)
    return Column(
        name,
        _Word(kind) if is_enum else _TYPES[get_origin(kind) or kind],
        nullable=NoneType in options,
        primary_key=is_key,
        autoincrement=is_key and counts,
    )


def _table(
    name: str,
    row: type,
    *more: SchemaItem,
    key: Sequence[str],
    counts: bool = False,
    without: Sequence[str] = (),
) -> Table:
    """The table of a dataclass of rows, with further columns, constraints and indexes.

    The database counts the key up if `counts`; fields in `without` are no columns.
    """
    hints = get_type_hints(row)
    columns = [
        _column(entry.name, hints[entry.name], is_key=entry.name in key, counts=counts)
        for entry in fields(row)
        if entry.name not in without
    ]
    _NAMES[row] = tuple(column.name for column in columns)
    _TABLES[row] = Table(name, metadata, *columns, *more, sqlite_autoincrement=counts)
    return _TABLES[row]


def suit_postgres() -> None:
    """Gives indexes of some rows alone their condition there: its dialect takes 40 ms to import."""
    for index in (index for table in metadata.tables.values() for index in table.indexes):
        index.dialect_options["postgresql"]["where"] = index.dialect_options["sqlite"]["where"]


schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

UNFINISHED = f"state NOT IN ({', '.join(repr(s.value) for s in sorted(OVER))})"
job = _table(
    "job",
    rows.Job,
    Column("key", Text, nullable=False),
    Column("digest", Text, nullable=False),
    UniqueConstraint("id"),
    UniqueConstraint("tenant", "key", name="job_key"),
    Index("job_by_state", "state", "number"),
    Index("job_by_name", "tenant", "name", "number"),
    Index("job_unfinished_name", "tenant", "name", unique=True, sqlite_where=text(UNFINISHED)),
    Index("job_with_wish", "number", sqlite_where=text("wish IS NOT NULL")),
    key=["number"],
    without=["is_new"],
)

document = Table(
    "document",
    metadata,
    Column("job", Text, primary_key=True),
    Column("body", _JSON, nullable=False),
    ForeignKeyConstraint(["job"], ["job.id"]),
)
"""Jobs' documents, apart from their rows: lists of jobs do not read them."""
document_text = cast(document.c.body, Text)

gang = _table(
    "gang",
    rows.Gang,
    Index("gang_one_alive", "name", unique=True, sqlite_where=text("state != 'ended'")),
    Index("gang_by_end", "ended_at"),
    key=["name", "epoch"],
)

command = _table(
    "command",
    Command,
    Column("written_at", Double, nullable=False),
    Column("applied_at", Double),
    ForeignKeyConstraint(["gang", "epoch"], ["gang.name", "gang.epoch"]),
    Index("command_unapplied", "gang", "epoch", "seq", sqlite_where=text("applied_at IS NULL")),
    key=["gang", "epoch", "seq"],
)

lease = _table(
    "lease",
    rows.Lease,
    Column("ended_at", Double),
    Column("why", Text),
    ForeignKeyConstraint(["job"], ["job.id"]),
    ForeignKeyConstraint(["gang", "gang_epoch"], ["gang.name", "gang.epoch"]),
    Index("lease_one_a_job", "job", unique=True, sqlite_where=text("ended_at IS NULL")),
    Index("lease_by_end", "ended_at"),
    key=["job", "epoch"],
)

event = _table(
    "event",
    rows.Event,
    Index("event_by_job", "job", "seq"),
    Index("event_by_gang", "gang", "seq"),
    key=["seq"],
    counts=True,
)

decision = _table("decision", rows.Decision, key=["seq"], counts=True)

board = _table("board", rows.Board, key=["name"])
"""The present state that a controller shows; each row is written over."""

controller = _table(
    "controller",
    rows.Lock,
    Column("id", Integer, primary_key=True, autoincrement=False),
    key=[],
)
"""At most one row, of id 1: who is, or was last, the controller."""

tenant = Table(
    "tenant",
    metadata,
    Column("name", Text, primary_key=True),
    Column("limits", _JSON, nullable=False),
)
"""Limits of tenants that have any of their own."""

token = _table(
    "token",
    rows.Token,
    Column("digest", Text, nullable=False, unique=True),
    Index("token_by_tenant", "tenant", "created_at"),
    key=["id"],
)

upload = _table(
    "upload",
    rows.Upload,
    UniqueConstraint("id"),
    Index("upload_by_tenant", "tenant", "number"),
    key=["number"],
    counts=True,
)

session = _table(
    "session", rows.Session, Index("session_by_tenant", "tenant", "created_at"), key=["id"]
)

model = _table(
    "model",
    rows.Model,
    ForeignKeyConstraint(["session"], ["session.id"]),
    ForeignKeyConstraint(["job"], ["job.id"]),
    Index("model_by_session", "session", "number"),
    Index("model_by_tenant", "tenant", "created_at"),
    key=["id"],
)

sampler = _table(
    "sampler",
    rows.Sampler,
    ForeignKeyConstraint(["session"], ["session.id"]),
    Index("sampler_by_session", "session", "number"),
    key=["id"],
)

checkpoint_note = _table(
    "checkpoint_note",
    rows.CheckpointNote,
    ForeignKeyConstraint(["model"], ["model.id"]),
    key=["model", "kind", "name"],
)

TENANCY = (tenant, token, upload)
"""The tables that version 3 brought."""
TINKER = (session, model, sampler, checkpoint_note)
"""The tables that version 4 brought."""


def query_of(row: type) -> Select[Any]:
    """A query for rows of a class, to be narrowed."""
    columns = _TABLES[row].c
    return select(*(columns[name] for name in _NAMES[row]))


def find_all(connection: Connection, row: type[Row], query: Executable) -> list[Row]:
    """The values that a query finds."""
    return [row(**found) for found in connection.execute(query).mappings()]


def find_one(connection: Connection, row: type[Row], query: Executable) -> Row | None:
    """The first value that a query finds."""
    found = connection.execute(query).mappings().first()
    return None if found is None else row(**found)


def values_of(value: Any) -> dict[str, Any]:
    """A row's columns by name, as statements take them."""
    return {name: getattr(value, name) for name in _NAMES[type(value)]}


def insert(connection: Connection, value: Any, **more: Any) -> None:
    """Writes a row, with columns that no value shows."""
    connection.execute(_TABLES[type(value)].insert(), {**values_of(value), **more})


def job_of(connection: Connection, job_id: str) -> rows.Job:
    """The job of an id; raises `NotFound` if there is none."""
    found = find_one(connection, rows.Job, query_of(rows.Job).where(job.c.id == job_id))
    if found is None:
        raise missing_job(job_id)
    return found


def missing_job(job_id: str) -> NotFound:
    return NotFound(f"a job's id must be one of the store's, got {job_id!r}")


def gang_of(connection: Connection, name: str, epoch: int) -> rows.Gang:
    """One start of a gang; raises `NotFound` if there is none."""
    query = query_of(rows.Gang).where(gang.c.name == name, gang.c.epoch == epoch)
    found = find_one(connection, rows.Gang, query)
    if found is None:
        raise NotFound(f"a gang must be one of the store's, got {name!r} of epoch {epoch}")
    return found


def record(
    connection: Connection,
    at: float,
    kind: str,
    *,
    job: str | None = None,
    gang: str | None = None,
    body: Mapping[str, Any] | None = None,
) -> None:
    """Writes one event in the transaction that makes it true."""
    row = {"at": at, "job": job, "gang": gang, "kind": kind, "body": dict(body or {})}
    connection.execute(event.insert(), row)


def in_parts(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Parts of a list, each short enough for one statement."""
    for begin in range(0, len(items), _MOST_PARAMETERS):
        yield items[begin : begin + _MOST_PARAMETERS]
