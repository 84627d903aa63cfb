"""Tables of a store, the same on SQLite and PostgreSQL."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from tlora_megatron.service.store.states import OVER

metadata = MetaData()

_BIG = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up by itself in a column of type INTEGER only, which holds 64 bits there."""
_JSON = JSON(none_as_null=True)
UNFINISHED = text(f"state NOT IN ({', '.join(repr(s.value) for s in sorted(OVER))})")

schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

job = Table(
    "job",
    metadata,
    Column("number", _BIG, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False, unique=True),
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("base", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("wish", Text),
    Column("schedule", _JSON, nullable=False),
    Column("stats", _JSON),
    Column("folder", Text),
    Column("gang", Text),
    Column("gang_epoch", _BIG),
    Column("lease", _BIG),
    Column("step", _BIG, nullable=False, default=0),
    Column("num_steps", _BIG),
    Column("tokens", _BIG, nullable=False, default=0),
    Column("loss", Double),
    Column("error", Text),
    Column("submitted_at", Double, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    UniqueConstraint("tenant", "key", name="job_key"),
    Index("job_by_state", "state", "number"),
    Index("job_by_name", "tenant", "name", "number"),
    Index(
        "job_unfinished_name",
        "tenant",
        "name",
        unique=True,
        sqlite_where=UNFINISHED,
        postgresql_where=UNFINISHED,
    ),
    Index(
        "job_with_wish",
        "number",
        sqlite_where=text("wish IS NOT NULL"),
        postgresql_where=text("wish IS NOT NULL"),
    ),
)

document = Table(
    "document",
    metadata,
    Column("job", Text, primary_key=True),
    Column("body", _JSON, nullable=False),
    ForeignKeyConstraint(["job"], ["job.id"]),
)
"""Jobs' documents, apart from their rows: lists of jobs do not read them."""

gang = Table(
    "gang",
    metadata,
    Column("name", Text, primary_key=True),
    Column("epoch", _BIG, primary_key=True, autoincrement=False),
    Column("spec", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("engine_ref", _JSON, nullable=False),
    Column("heard", _BIG, nullable=False, default=0),
    Column("last_seq", _BIG, nullable=False, default=0),
    Column("lease_until", Double, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("why", Text),
    Index(
        "gang_one_alive",
        "name",
        unique=True,
        sqlite_where=text("state != 'ended'"),
        postgresql_where=text("state != 'ended'"),
    ),
    Index("gang_by_end", "ended_at"),
)

command = Table(
    "command",
    metadata,
    Column("gang", Text, primary_key=True),
    Column("epoch", _BIG, primary_key=True, autoincrement=False),
    Column("seq", _BIG, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("job", Text),
    Column("body", _JSON, nullable=False),
    Column("written_at", Double, nullable=False),
    Column("applied_at", Double),
    ForeignKeyConstraint(["gang", "epoch"], ["gang.name", "gang.epoch"]),
    Index(
        "command_unapplied",
        "gang",
        "epoch",
        "seq",
        sqlite_where=text("applied_at IS NULL"),
        postgresql_where=text("applied_at IS NULL"),
    ),
)

lease = Table(
    "lease",
    metadata,
    Column("job", Text, primary_key=True),
    Column("epoch", _BIG, primary_key=True, autoincrement=False),
    Column("gang", Text, nullable=False),
    Column("gang_epoch", _BIG, nullable=False),
    Column("granted_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("why", Text),
    ForeignKeyConstraint(["job"], ["job.id"]),
    ForeignKeyConstraint(["gang", "gang_epoch"], ["gang.name", "gang.epoch"]),
    Index(
        "lease_one_a_job",
        "job",
        unique=True,
        sqlite_where=text("ended_at IS NULL"),
        postgresql_where=text("ended_at IS NULL"),
    ),
    Index("lease_by_end", "ended_at"),
)

event = Table(
    "event",
    metadata,
    Column("seq", _BIG, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("job", Text),
    Column("gang", Text),
    Column("kind", Text, nullable=False),
    Column("body", _JSON, nullable=False),
    Index("event_by_job", "job", "seq"),
    Index("event_by_gang", "gang", "seq"),
    sqlite_autoincrement=True,
)

decision = Table(
    "decision",
    metadata,
    Column("seq", _BIG, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("snapshot", _JSON, nullable=False),
    Column("actions", _JSON, nullable=False),
    Column("why", Text, nullable=False),
    sqlite_autoincrement=True,
)

board = Table(
    "board",
    metadata,
    Column("name", Text, primary_key=True),
    Column("at", Double, nullable=False),
    Column("body", _JSON, nullable=False),
)
"""The present state that a controller shows; each row is written over."""

controller = Table(
    "controller",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", _BIG, nullable=False),
    Column("owner", Text, nullable=False),
    Column("beat_at", Double, nullable=False),
)
"""At most one row, of id 1: who is, or was last, the controller."""

tenant = Table(
    "tenant",
    metadata,
    Column("name", Text, primary_key=True),
    Column("limits", _JSON, nullable=False),
)
"""Limits of tenants that have any of their own."""

token = Table(
    "token",
    metadata,
    Column("id", Text, primary_key=True),
    Column("digest", Text, nullable=False, unique=True),
    Column("tenant", Text, nullable=False),
    Column("scopes", _JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
    Index("token_by_tenant", "tenant", "created_at"),
)

upload = Table(
    "upload",
    metadata,
    Column("number", _BIG, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("size", _BIG, nullable=False),
    Column("facts", _JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("deleted_at", Double),
    Index("upload_by_tenant", "tenant", "number"),
    sqlite_autoincrement=True,
)

TENANCY = (tenant, token, upload)
"""The tables that version 3 brought."""
