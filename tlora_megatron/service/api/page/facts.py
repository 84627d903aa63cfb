"""What the page is shown of a service and its jobs, as who looks may see it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.service.api.service import Service
from tlora_megatron.service.history import last_rows
from tlora_megatron.service.store import LIVE, OVER, Board, Gang, Job, JobState, Stay
from tlora_megatron.service.sweeps import StoredSweep, sweeps_of

WAITING = (JobState.VALIDATING, JobState.QUEUED, JobState.PAUSED)
SHOWN_JOBS = 200
"""Waiting jobs that are listed; of more than these only the number is told."""
SHOWN_ENDED = 20
SHOWN_SWEEPS = 3
_MOST_LIVE = 5000
WINDOW_S = 1800.0
"""How far the time line goes back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The state of a whole service at one moment."""

    at: float
    """Unix time."""
    is_served: bool
    """A controller gives signs of life."""
    boards: Mapping[str, Board]
    gangs: tuple[Gang, ...]
    """Those of the time line's window, the living ones among them, in the order of their starts."""
    stays: tuple[Stay, ...]
    jobs: Mapping[str, Job]
    """Jobs that gangs hold or held in the window, by id."""
    waiting: Mapping[str | None, tuple[Job, ...]] = field(default_factory=dict)
    """First jobs of each tenant that wait; under None those of all."""
    ended: Mapping[str | None, tuple[Job, ...]] = field(default_factory=dict)
    """Last jobs of each tenant that are over; under None those of all."""
    counts: Mapping[str | None, Mapping[JobState, int]] = field(default_factory=dict)
    """Jobs by state, of each tenant; under None all."""
    sweeps: Mapping[str | None, tuple[StoredSweep, ...]] = field(default_factory=dict)
    """Newest sweeps of each tenant; under None those of all."""
    base_names: Mapping[str, str] = field(default_factory=dict)
    """Names of bases, by the keys that jobs have for them."""

    def board(self, name: str) -> Mapping[str, Any]:
        """The values that the controller shows under a name; empty if it has not yet."""
        found = self.boards.get(name)
        return {} if found is None else found.body

    def base_name(self, key: str) -> str:
        """The name of a base, or the last part of its path."""
        return self.base_names.get(key) or key.rpartition("-")[0] or key

    @property
    def living(self) -> tuple[Gang, ...]:
        """Gangs without proof that they are gone."""
        return tuple(gang for gang in self.gangs if gang.ended_at is None)


def read_facts(service: Service, tenants: frozenset[str | None]) -> Facts:
    """Reads the state of a service, and own jobs of some tenants; None: of all tenants."""
    store, now_s = service.store, time.time()
    live = store.jobs.page(states=LIVE, limit=_MOST_LIVE)
    stays = store.leases.stays_since(now_s - WINDOW_S)
    missing = {stay.job for stay in stays} - {job.id for job in live}

    def own(tenant: str | None, **which: Any) -> tuple[Job, ...]:
        """Jobs as a tenant may read of them: errors without paths of the service's host."""
        jobs = store.jobs.page(tenant=tenant, **which)
        if tenant is None:
            return tuple(jobs)
        return tuple(
            job if job.error is None else replace(job, error=service.outward(job.error, tenant))
            for job in jobs
        )

    return Facts(
        at=now_s,
        is_served=service.is_served,
        boards=store.boards.read(),
        gangs=tuple(store.gangs.since(now_s - WINDOW_S)),
        stays=tuple(stays),
        jobs={job.id: job for job in [*live, *store.jobs.many(sorted(missing))]},
        waiting={of: own(of, states=WAITING, limit=SHOWN_JOBS) for of in tenants},
        ended={of: own(of, states=OVER, limit=SHOWN_ENDED, newest_first=True) for of in tenants},
        counts={tenant: store.jobs.counts(tenant=tenant) for tenant in {*tenants, None}},
        sweeps={of: tuple(sweeps_of(store, of, SHOWN_SWEEPS)) for of in tenants},
        base_names=service.base_names(),
    )


_KEY = secrets.token_bytes(32)
"""Others' jobs get their names for strangers with it; a new process gives new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewer:
    """A tenant, or an admin, who sees all tenants' jobs."""

    tenant: str
    sees_all: bool = False

    @property
    def scope(self) -> str | None:
        """The tenant to whose jobs lists are restricted; None for all."""
        return None if self.sees_all else self.tenant

    def may_see(self, job: Job | None) -> bool:
        return job is not None and (self.sees_all or job.tenant == self.tenant)

    def stranger(self, job: str) -> str:
        """A name for a job of somebody else, the same as long as this process lives."""
        text = f"{self.tenant}\0{job}".encode()
        return "~" + hmac.new(_KEY, text, hashlib.sha256).hexdigest()[:8]

    def name(self, job: str, row: Job | None) -> dict[str, Any]:
        if row is None or not self.may_see(row):
            return {"id": self.stranger(job), "own": False}
        named: dict[str, Any] = {"id": row.id, "own": True, "name": row.name}
        return {**named, "tenant": row.tenant} if self.sees_all else named


_MOST_BYTES = 4_000_000
"""Read of a long job's metrics: its last steps."""


class Point(NamedTuple):
    """One step of a curve."""

    step: int
    loss: float


def read_curves(path: Path, points: int) -> dict[str, list[Point]]:
    """Losses of steps and of evaluations, each [] before the first one."""
    rows = last_rows(path, most_bytes=_MOST_BYTES)
    names = {"points": "loss", "evaluations": "eval_loss"}
    return {name: _thinned(rows, loss, points) for name, loss in names.items()}


def _thinned(rows: Sequence[Mapping[str, Any]], name: str, points: int) -> list[Point]:
    """A loss over steps, thinned by means over equal runs of steps."""
    steps = [Point(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if len(steps) <= points:
        return steps
    size = -(-len(steps) // points)
    runs = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
    return [Point(run[-1].step, sum(p.loss for p in run) / len(run)) for run in runs]
