"""Commands to gangs: written before they are posted, numbered without a gap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import RowMapping, select, update

from tlora_megatron.service.messages import Command, CommandKind, GangSpec
from tlora_megatron.service.store.errors import IllegalChange, NotFound
from tlora_megatron.service.store.lookups import gang_row
from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database
from tlora_megatron.service.store.states import GangState

_COMMAND = tables.command.c
SHOWN = (
    _COMMAND.gang,
    _COMMAND.epoch,
    _COMMAND.seq,
    _COMMAND.kind,
    _COMMAND.job,
    _COMMAND.body,
)
UNAPPLIED = select(*SHOWN).where(_COMMAND.applied_at.is_(None))


def as_command(row: RowMapping) -> Command:
    """The command of a row of `SHOWN`."""
    return Command(**row)


class Commands:
    """The commands of a store. Gangs drop what they have applied, so any may be posted again."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(
        self,
        gang: str,
        epoch: int,
        kind: CommandKind,
        *,
        job: str | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Command:
        """Writes the next command of a gang; it is to be posted after the commit.

        The gang may believe in its leases for its whole `lease_s` from now on.

        Raises:
            IllegalChange: if the gang has ended.
        """
        with self._database.write() as connection:
            found = gang_row(connection, gang, epoch)
            if found["state"] == GangState.ENDED:
                raise IllegalChange(
                    f"gang {gang!r} must be alive to be told to {kind}, got epoch {epoch}, which "
                    "has ended"
                )
            now = self._database.clock()
            until = now + GangSpec.from_json(found["spec"]).lease_s
            command = Command(
                gang=gang,
                epoch=epoch,
                seq=found["last_seq"] + 1,
                kind=kind,
                job=job,
                body=dict(body or {}),
            )
            connection.execute(
                update(tables.gang)
                .where(tables.gang.c.name == gang, tables.gang.c.epoch == epoch)
                .values(last_seq=command.seq, lease_until=max(until, found["lease_until"]))
            )
            row = {name: getattr(command, name) for name in (column.name for column in SHOWN)}
            connection.execute(tables.command.insert().values(**row, written_at=now))
            return command

    def mark_applied(self, gang: str, epoch: int, seq: int) -> bool:
        """Notes that a gang carried a command out; False if that was known.

        Raises:
            NotFound: if there is no such command.
        """
        this = (_COMMAND.gang == gang, _COMMAND.epoch == epoch, _COMMAND.seq == seq)
        with self._database.write() as connection:
            query = update(tables.command).where(*this, _COMMAND.applied_at.is_(None))
            query = query.values(applied_at=self._database.clock())
            if connection.execute(query).rowcount:
                return True
            if connection.execute(select(_COMMAND.seq).where(*this)).first() is None:
                raise NotFound(
                    f"a command must have been written to be applied, got number {seq} of gang "
                    f"{gang!r} of epoch {epoch}"
                )
            return False
