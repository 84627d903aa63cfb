"""The rows of a store; `tables` makes a column of each field. Times are Unix seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tlora_megatron.service.messages import Command, GangSpec
from tlora_megatron.service.store.states import GangState, JobState, RequestedAction

LOCAL = "local"
"""The tenant of the command line in the service's folder."""
SCOPES = ("submit", "read", "admin", "scrape")
"""Rights of tokens: send jobs and files, look at its tenant's, all of it for everybody, and read
the service's figures (`/metrics`), which is all that Prometheus needs."""


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
    """Settings of the scheduler for it."""


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
    wish: RequestedAction | None = None
    """The action that a user has requested; a controller carries it out."""
    schedule: Mapping[str, Any]
    stats: Mapping[str, Any] | None = None
    """Lengths of its rows and what else validation found."""
    gang: str | None = None
    gang_epoch: int | None = None
    lease: int | None = None
    """Epoch of the lease under which the gang writes its folder."""
    step: int = 0
    num_steps: int | None = None
    tokens: int = 0
    loss: float | None = None
    error: str | None = None
    submitted_at: float
    changed_at: float
    """Last change of state."""
    started_at: float | None = None
    """When it ran first."""
    ended_at: float | None = None
    removed_at: float | None = None
    """When it was taken out of all lists; its folder goes then."""
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
    heard: int = 0
    """Number of the last of its events whose effects are in the store."""
    last_seq: int = 0
    """Number of the last command that was written for it."""
    lease_until: float
    """It writes nothing after this time unless another command has come."""
    started_at: float
    ended_at: float | None = None
    why: str | None = None
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


WHY_QUEUED = "why_queued"
"""Name of the board with the reasons why jobs wait."""


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
        if not self.owner:
            return "no controller"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token without its secret, of which the store keeps the SHA-256 alone."""

    id: str
    tenant: str
    scopes: tuple[str, ...]
    created_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewUpload:
    """A file that has arrived."""

    id: str
    """Names the file in the tenant's folder."""
    name: str
    """Its owner's name for it; for display only."""
    purpose: str
    digest: str
    """SHA-256 of its bytes."""
    size: int
    facts: Mapping[str, Any]
    """Further facts that were found while it was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload(NewUpload):
    """A file of a tenant."""

    number: int
    """Grows with every upload; pages of uploads follow it."""
    tenant: str
    created_at: float
    deleted_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLimits:
    """How much a tenant may have at a time."""

    gpus: int | None = None
    """GPUs that its training jobs ask for together; None: all."""
    jobs: int = 1000
    """Unfinished jobs."""
    upload_bytes: int = 10 * 10**9
    """Bytes of all files, and of the requests of models that clients drive."""
    disk_bytes: int | None = None
    """Bytes of all files and of the folders of all jobs; None: any number."""
    requests_per_s: float = 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A client of Tinker's API between its start and its end."""

    id: str
    tenant: str
    created_at: float
    sdk_version: str
    display_name: str | None = None
    user_metadata: Mapping[str, str] | None = None
    heard_at: float
    """Its last heartbeat, or one of the half-minute before; see `Sessions.heard_at`."""
    ended: str | None = None
    """Why no more is taken from it; None: it goes on."""
    ended_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model of a session as its client asked for it."""

    id: str
    tenant: str
    session: str
    number: int
    """Among the models of the session, from 0."""
    job: str
    """Id of the job that trains it."""
    base: str
    """Name of the base model."""
    created_at: float
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    """Remembered only: nothing adapts the unembedding here."""
    user_metadata: Mapping[str, str] | None = None
    loaded_from: str | None = None
    """Checkpoint that it was made from: its load is the first request in the job's log."""
    last_request: int | None = None
    """Number of the request by which its job ends, 0: none; None: the model takes requests."""

    def log_number(self, seq_id: int) -> int:
        """Number in the job's log of the request that the client counts as `seq_id`."""
        return seq_id + (self.loaded_from is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """The base or the weights that a client samples from."""

    id: str
    tenant: str
    session: str
    number: int
    base: str
    model_path: str | None = None
    """A `tinker://` path; None: the base alone."""
    version: str | None = None
    """The `AdapterVersion` to which that path led when the client was made: it stays at this one,
    unless it moves with the newest of its kind. None: the base alone, or weights from before there
    were versions."""
    clients: int = 0
    """Copies of the client that have joined, beside the first."""
    heard_at: float
    """When it was asked last, as for sessions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointNote:
    """A client's own words about a checkpoint, which is a folder of the model's job."""

    model: str
    kind: str
    name: str
    created_at: float
    user_metadata: Mapping[str, str] | None = None
    expires_at: float | None = None


class JobTotals(NamedTuple):
    """What some jobs are together."""

    jobs: int
    tokens: int
    oldest_at: float
    """When the first of them was submitted."""
