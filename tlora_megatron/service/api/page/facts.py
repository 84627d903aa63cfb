"""Reads from the store what the views are drawn from, for all who ask at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import LIVE, OVER, Board, Gang, Job, JobState, Stay

WAITING = (JobState.VALIDATING, JobState.QUEUED, JobState.PAUSED)
SHOWN_JOBS = 200
"""Waiting jobs that are listed; of more than these only the number is told."""
SHOWN_ENDED = 20
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
    """Reads the state of a service from its store.

    Args:
        service: the service.
        tenants: of whose own jobs are needed too; None among them: of all tenants'.
    """
    store, now_s = service.store, time.time()
    live = store.jobs.page(states=LIVE, limit=_MOST_LIVE)
    stays = store.leases.stays_since(now_s - WINDOW_S)
    missing = {stay.job for stay in stays} - {job.id for job in live}
    return Facts(
        at=now_s,
        is_served=service.is_served,
        boards=store.boards.read(),
        gangs=tuple(store.gangs.since(now_s - WINDOW_S)),
        stays=tuple(stays),
        jobs={job.id: job for job in [*live, *store.jobs.many(sorted(missing))]},
        waiting={
            tenant: _of(
                tenant, service, store.jobs.page(states=WAITING, tenant=tenant, limit=SHOWN_JOBS)
            )
            for tenant in tenants
        },
        ended={
            tenant: _of(
                tenant,
                service,
                store.jobs.page(states=OVER, tenant=tenant, limit=SHOWN_ENDED, newest_first=True),
            )
            for tenant in tenants
        },
        counts={tenant: store.jobs.counts(tenant=tenant) for tenant in {*tenants, None}},
        base_names=service.base_names(),
    )


def _of(tenant: str | None, service: Service, jobs: Iterable[Job]) -> tuple[Job, ...]:
    """Jobs as a tenant may read of them: errors without paths of the service's host."""
    if tenant is None:
        return tuple(jobs)
    return tuple(
        job if job.error is None else replace(job, error=service.outward(job.error, tenant))
        for job in jobs
    )
