"""The rows of a store as values; times are Unix seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tlora_megatron.service.messages import Command, GangSpec
from tlora_megatron.service.store.states import GangState, JobState, Wish


@dataclass(frozen=True, kw_only=True, slots=True)
class NewJob:
    """A job as it is submitted."""

    name: str
    """For display and lookup; unique among a tenant's unfinished jobs."""
    document: Mapping[str, Any]
    """The job as an entry of `jobs` in a run's configuration."""
    base: str
    """Name of the base model that it adapts."""
    key: str
    """Idempotency key: a second submit with the same key makes no second job."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """The facts about it that the scheduler is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job without its document, which `Jobs.document` reads."""

    number: int
    """Grows with every submit; pages of jobs follow it."""
    id: str
    tenant: str
    name: str
    base: str
    state: JobState
    wish: Wish | None
    schedule: Mapping[str, Any]
    stats: Mapping[str, Any] | None
    """Lengths of its rows and what else validation found."""
    folder: str | None
    gang: str | None
    gang_epoch: int | None
    lease: int | None
    """Epoch of the lease under which the gang writes its folder."""
    step: int
    num_steps: int | None
    tokens: int
    loss: float | None
    error: str | None
    submitted_at: float
    changed_at: float
    """Last change of state."""
    started_at: float | None
    """When it ran first."""
    ended_at: float | None
    is_new: bool = False
    """True in the answer to the submit that made it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a running job has come."""

    job: str
    step: int
    tokens: int
    loss: float | None = None
    num_steps: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened; never changed once written."""

    seq: int
    at: float
    job: str | None
    gang: str | None
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """One start of a gang."""

    name: str
    epoch: int
    spec: GangSpec
    state: GangState
    engine_ref: Mapping[str, Any]
    """A controller's notes on it: its pool, and how it was to end."""
    heard: int
    """Number of the last of its events whose effects are in the store."""
    lease_until: float
    """It writes nothing after this time, if it was told nothing since."""
    started_at: float
    ended_at: float | None
    why: str | None
    """Why it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A gang's right to write a job's folder."""

    job: str
    epoch: int
    gang: str
    gang_epoch: int
    granted_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """A job's time in a gang."""

    job: str
    gang: str
    gang_epoch: int
    since: float
    until: float | None
    """None while it is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """One table that a controller shows of the present moment."""

    name: str
    at: float
    """When it last changed."""
    body: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One decision of a controller, with what it looked at."""

    seq: int
    at: float
    snapshot: Mapping[str, Any]
    actions: Sequence[Any]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """The controller that runs, or ran last."""

    epoch: int
    owner: str
    """Host, process and its start, in JSON; empty if the lock was given back."""
    beat_at: float

    @property
    def who(self) -> str:
        """The controller in messages."""
        if not self.owner:
            return "nobody"
        found = json.loads(self.owner)
        return f"process {found['pid']} of {found['host']}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All that a controller needs to take up where another stopped."""

    jobs: Sequence[Job]
    """Unfinished ones, in the order of their submission."""
    gangs: Sequence[Gang]
    """Those without proof that they are gone."""
    commands: Sequence[Command]
    """Those not applied, of these gangs, in order within each."""
    leases: Sequence[Lease]
    """Those not given back."""
    last_event: int
