"""Who may write: the controller that holds a store's lock, gangs with leases of jobs' folders."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, desc, func, select, update

from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Part
from tlora_megatron.service.store.rows import Gang, Job, Lease, Lock, Stay
from tlora_megatron.service.store.states import (
    GangState,
    IllegalChange,
    LeaseHeld,
    LockHeld,
    LockLost,
)

STALE_S = 15.0
"""A controller of another host that gave no sign of life for so long is taken for dead."""


class ControllerLock(Part):
    """Taken by a controller; from then on every write of this store is made under it."""

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
            tables.insert(connection, lock, id=1)
        self._database.fence = epoch
        return epoch

    def beat(self) -> None:
        """Gives a sign of life; raises `LockLost` if another controller has taken over."""
        with self._database.write() as connection:
            if self._database.fence is None:
                raise LockLost(f"a controller must take the lock of {self._database.place} first")
            now = self._database.clock()
            connection.execute(update(tables.controller).values(beat_at=now))

    def release(self) -> None:
        """Gives the lock back, so that another controller need not wait."""
        if self._database.fence is not None:
            self._database.execute(update(tables.controller).values(owner="", beat_at=0.0))
        self._database.fence = None

    def holder(self) -> Lock | None:
        """Who took the lock last; the owner is empty if it was given back."""
        return self._database.first(Lock, tables.query_of(Lock))

    def is_held(self) -> bool:
        """True if a controller runs, by its last sign of life."""
        held = self.holder()
        return held is not None and not _is_gone(held, self._database.clock(), STALE_S)


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


MARGIN_S = 10.0
"""Waited past a gang's own deadline before its jobs are given away without proof of its death."""

_LEASE = tables.lease.c


class Leases(Part):
    """Grants leases; a job has one at most, and each has an epoch above all before it."""

    def grant(self, job: str, gang: str, epoch: int) -> Lease:
        """Gives a gang the right to write a job's folder.

        A gang that has it must have given it back, have ended, or not have got a command for so
        long that it stopped.

        Raises:
            LeaseHeld: if another gang may still write.
            IllegalChange: if the job is over or the gang has ended.
        """
        with self._database.write() as connection:
            now = self._database.clock()
            found, taker = tables.job_of(connection, job), tables.gang_of(connection, gang, epoch)
            _check_parties(found, taker)
            present = _present(connection, job)
            if present is not None:
                why = _proof(connection, present, taker, found, now)
                end_lease(connection, found, now, why)
            query = select(func.max(_LEASE.epoch)).where(_LEASE.job == job)
            lease = Lease(
                job=job,
                epoch=1 + (connection.execute(query).scalar() or 0),
                gang=gang,
                gang_epoch=epoch,
                granted_at=now,
            )
            tables.insert(connection, lease)
            _tell_job(connection, job, lease)
            body = {"lease": lease.epoch, "epoch": epoch}
            tables.record(connection, now, "granted", job=job, gang=gang, body=body)
            return lease

    def release(self, job: str, *, lease: int, why: str) -> bool:
        """Ends a lease; returns False if it is not the present one any more."""
        with self._database.write() as connection:
            found = tables.job_of(connection, job)
            if found.lease != lease:
                return False
            end_lease(connection, found, self._database.clock(), why)
            return True

    def of(self, job: str) -> Lease | None:
        """The lease of a job that was not given back."""
        with self._database.read() as connection:
            return _present(connection, job)

    def all(self) -> list[Lease]:
        """All leases that were not given back."""
        query = tables.query_of(Lease).where(_LEASE.ended_at.is_(None))
        return self._database.all(Lease, query.order_by(_LEASE.granted_at, _LEASE.job))

    def stays_since(self, at: float, *, limit: int = 5000) -> list[Stay]:
        """The times of jobs in gangs that did not end before `at`, in the order they began."""
        columns = (
            _LEASE.job,
            _LEASE.gang,
            _LEASE.gang_epoch,
            _LEASE.granted_at.label("since"),
            _LEASE.ended_at.label("until"),
        )
        query = select(*columns).where(_LEASE.ended_at.is_(None) | (_LEASE.ended_at > at))
        query = query.order_by(desc(_LEASE.granted_at), _LEASE.job).limit(limit)
        return self._database.all(Stay, query)[::-1]


def end_lease(connection: Connection, job: Job, now: float, why: str) -> None:
    if job.lease is None:
        return
    connection.execute(
        update(tables.lease)
        .where(_LEASE.job == job.id, _LEASE.ended_at.is_(None))
        .values(ended_at=now, why=why)
    )
    _tell_job(connection, job.id, None)
    body = {"lease": job.lease, "epoch": job.gang_epoch, "why": why}
    tables.record(connection, now, "released", job=job.id, gang=job.gang, body=body)


def _tell_job(connection: Connection, job: str, lease: Lease | None) -> None:
    """Repeats the lease in the job's row, where lists of jobs read it."""
    values = {
        "gang": lease and lease.gang,
        "gang_epoch": lease and lease.gang_epoch,
        "lease": lease and lease.epoch,
    }
    connection.execute(update(tables.job).where(tables.job.c.id == job).values(**values))


def _present(connection: Connection, job: str) -> Lease | None:
    query = tables.query_of(Lease).filter_by(job=job, ended_at=None)
    return tables.find_one(connection, Lease, query)


def _check_parties(job: Job, gang: Gang) -> None:
    if job.state.is_over:
        raise IllegalChange(
            f"job {job.name!r} ({job.id}) must be unfinished to be leased to gang "
            f"{gang.name!r}, got one that is {job.state}"
        )
    if gang.state is GangState.ENDED:
        raise IllegalChange(
            f"gang {gang.name!r} must be alive to be leased job {job.name!r} ({job.id}), got "
            f"epoch {gang.epoch}, which has ended"
        )


def _proof(connection: Connection, held: Lease, taker: Gang, job: Job, now: float) -> str:
    """Why a lease may be ended."""
    if (held.gang, held.gang_epoch) == (taker.name, taker.epoch):
        return "granted again"
    holder = tables.gang_of(connection, held.gang, held.gang_epoch)
    if holder.state is GangState.ENDED:
        return "its gang has ended"
    left_s = holder.lease_until + MARGIN_S - now
    if left_s < 0:
        return "expired"
    raise LeaseHeld(
        f"job {job.name!r} ({job.id}) must be given back by gang {held.gang!r} of epoch "
        f"{held.gang_epoch} before gang {taker.name!r} may have it, got a lease that stands "
        f"for {left_s:.0f} s: wait for `left` or for the gang's end, or let it run out"
    )
