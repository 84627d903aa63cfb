"""Gangs and their commands.

Each start under a name has an epoch of its own, and its events count once. Commands are written
before they are posted, and numbered without a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, delete, desc, exists, func, select, update

from tlora_megatron.service.messages import Command, CommandKind, GangEvent, GangSpec
from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Part
from tlora_megatron.service.store.rows import Gang
from tlora_megatron.service.store.states import GANG_CHANGES, GangState, IllegalChange, NotFound

_GANG, _COMMAND = tables.gang.c, tables.command.c
_COMMANDS_KEPT_S = 86_400.0
"""Commands of gangs that ended before are removed: most of them only renew leases."""


class Heard(NamedTuple):
    """The new ones among reported events."""

    new: list[GangEvent]
    """Those whose effects are not in the store yet, in order."""
    missed: dict[tuple[str, int], str]
    """Gangs, by name and epoch, that reported an event before an earlier one, and which."""


class Gangs(Part):
    """The gangs of a store."""

    def next_epoch(self, name: str) -> int:
        """The epoch that the next start under a name must have."""
        query = select(func.max(_GANG.epoch)).where(_GANG.name == name)
        with self._database.read() as connection:
            return 1 + (connection.execute(query).scalar() or 0)

    def last_number(self) -> int:
        """The highest number N of a gang `gN` that was ever started; 0 = none was."""
        with self._database.read() as connection:
            names = connection.execute(select(_GANG.name).distinct()).scalars()
            return max((int(name[1:]) for name in names if name[1:].isdigit()), default=0)

    def add(self, spec: GangSpec, *, engine_ref: Mapping[str, Any] | None = None) -> Gang:
        """Notes a gang that is about to be started, of the next epoch after an ended one."""
        with self._database.write() as connection:
            query = select(_GANG.epoch, _GANG.state).where(_GANG.name == spec.gang)
            last = connection.execute(query.order_by(desc(_GANG.epoch)).limit(1)).first()
            if last is not None and last.state != GangState.ENDED:
                raise IllegalChange(
                    f"gang {spec.gang!r} must have ended to start again, got epoch {last.epoch}, "
                    f"which is {last.state}"
                )
            epoch = 1 if last is None else last.epoch + 1
            if spec.epoch != epoch:
                raise IllegalChange(
                    f"gang {spec.gang!r} must start with epoch {epoch}, got {spec.epoch}"
                )
            now = self._database.clock()
            gang = Gang(
                name=spec.gang,
                epoch=epoch,
                spec=spec,
                state=GangState.STARTING,
                engine_ref=dict(engine_ref or {}),
                lease_until=now + spec.lease_s,
                started_at=now,
            )
            tables.insert(connection, gang)
            _forget_commands(connection, now - _COMMANDS_KEPT_S)
            body = {"epoch": epoch, "to": gang.state.value}
            tables.record(connection, now, "gang", gang=spec.gang, body=body)
            return gang

    def change(self, name: str, epoch: int, to: GangState, *, why: str | None = None) -> Gang:
        """Changes a gang's state; `ended` is said with proof that its processes are gone."""
        to = GangState(to)
        with self._database.write() as connection:
            state = tables.gang_of(connection, name, epoch).state
            if to not in GANG_CHANGES[state]:
                raise IllegalChange(
                    f"gang {name!r} of epoch {epoch} must go from {state} to "
                    f"{', '.join(sorted(GANG_CHANGES[state])) or 'nothing else'}, got {to}"
                )
            now = self._database.clock()
            values: dict[str, Any] = {"state": to}
            if to is GangState.ENDED:
                values |= {"ended_at": now, "why": why}
            _update(connection, name, epoch, values)
            body = {"epoch": epoch, "from": state.value, "to": to.value}
            if why is not None:
                body["why"] = why
            tables.record(connection, now, "gang", gang=name, body=body)
            return tables.gang_of(connection, name, epoch)

    def note(self, name: str, epoch: int, **values: Any) -> None:
        """Adds to what is remembered of a gang, in `engine_ref`."""
        with self._database.write() as connection:
            ref = {**tables.gang_of(connection, name, epoch).engine_ref, **values}
            _update(connection, name, epoch, {"engine_ref": ref})

    def hear(self, events: Sequence[GangEvent]) -> Heard:
        """Notes that events' effects are in the store.

        Called in one transaction with what the events cause, it makes each of them count once,
        wherever a controller is killed. Gangs that have ended have nothing more to say.
        """
        with self._database.write() as connection:
            before = self.cursor()
            heard = _in_order(events, before)
            last = {(event.gang, event.epoch): event.number for event in heard.new}
            rows = [
                {"of": name, "of_epoch": epoch, "new": number}
                for (name, epoch), number in last.items()
            ]
            if rows:
                this = (_GANG.name == bindparam("of"), _GANG.epoch == bindparam("of_epoch"))
                query = update(tables.gang).where(*this).values(heard=bindparam("new"))
                connection.execute(query, rows)
        return heard

    def cursor(self) -> dict[tuple[str, int], int]:
        """Numbers of the last events heard of all gangs that have not ended."""
        query = select(_GANG.name, _GANG.epoch, _GANG.heard).where(_GANG.state != GangState.ENDED)
        with self._database.read() as connection:
            return {(name, epoch): heard for name, epoch, heard in connection.execute(query)}

    def get(self, name: str, epoch: int) -> Gang:
        """One start of a gang; raises `NotFound` if there is none."""
        with self._database.read() as connection:
            return tables.gang_of(connection, name, epoch)

    def live(self) -> list[Gang]:
        """Gangs without proof that they are gone, in the order of their starts."""
        query = tables.query_of(Gang).where(_GANG.state != GangState.ENDED)
        return self._database.all(Gang, query.order_by(_GANG.started_at, _GANG.name))

    def ended_since(self, at: float) -> list[Gang]:
        """The gangs that ended after a time, in the order of their ends."""
        query = tables.query_of(Gang).where(_GANG.ended_at > at)
        return self._database.all(Gang, query.order_by(_GANG.ended_at, _GANG.name))

    def since(self, at: float, *, limit: int = 2000) -> list[Gang]:
        """The gangs that did not end before `at`, in the order of their starts."""
        query = tables.query_of(Gang).where(_GANG.ended_at.is_(None) | (_GANG.ended_at > at))
        query = query.order_by(desc(_GANG.started_at), desc(_GANG.name)).limit(limit)
        return self._database.all(Gang, query)[::-1]


def _in_order(events: Sequence[GangEvent], before: Mapping[tuple[str, int], int]) -> Heard:
    """Events behind those heard before, up to the first gap of each gang."""
    last, heard = dict(before), Heard([], {})
    for event in events:
        key = (event.gang, event.epoch)
        if key not in last or key in heard.missed or event.number <= last[key]:
            continue
        if event.number > last[key] + 1:
            heard.missed[key] = f"told event {event.number} before event {last[key] + 1}"
            continue
        last[key] = event.number
        heard.new.append(event)
    return heard


def _update(connection: Connection, name: str, epoch: int, values: Mapping[str, Any]) -> None:
    query = update(tables.gang).where(_GANG.name == name, _GANG.epoch == epoch)
    connection.execute(query.values(**values))


def _forget_commands(connection: Connection, before: float) -> None:
    ended = exists().where(
        _GANG.name == tables.command.c.gang,
        _GANG.epoch == tables.command.c.epoch,
        _GANG.ended_at < before,
    )
    connection.execute(delete(tables.command).where(ended))


class Commands(Part):
    """The commands of a store. Gangs drop what they have applied, so any may be posted again."""

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
            found = tables.gang_of(connection, gang, epoch)
            if found.state is GangState.ENDED:
                raise IllegalChange(
                    f"gang {gang!r} must be alive to be told to {kind}, got epoch {epoch}, which "
                    "has ended"
                )
            now = self._database.clock()
            seq, until = found.last_seq + 1, max(now + found.spec.lease_s, found.lease_until)
            command = Command(
                gang=gang, epoch=epoch, seq=seq, kind=kind, job=job, body=dict(body or {})
            )
            _update(connection, gang, epoch, {"last_seq": seq, "lease_until": until})
            tables.insert(connection, command, written_at=now)
            return command

    def unapplied(self) -> list[Command]:
        """Commands that gangs which have not ended are not known to have applied, in order."""
        this = (_GANG.name == _COMMAND.gang) & (_GANG.epoch == _COMMAND.epoch)
        query = tables.query_of(Command).join(tables.gang, this)
        query = query.where(_COMMAND.applied_at.is_(None), _GANG.state != GangState.ENDED)
        query = query.order_by(_COMMAND.gang, _COMMAND.epoch, _COMMAND.seq)
        return self._database.all(Command, query)

    def mark_applied(self, gang: str, epoch: int, seq: int) -> bool:
        """Notes that a gang carried a command out; False if known, `NotFound` if there is none."""
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
