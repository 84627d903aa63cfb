"""Jobs, their states, what is asked of them and where, as all parts of a service see them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")

RequestedAction = Literal["cancel", "pause", "resume"]
"""What a user asks of a job; a controller carries it out. Its column is called `wish`."""

Action = Literal["cancel", "pause", "resume", "remove", "remove_checkpoints"]
"""What can be done to many jobs at once; the last two take folders of jobs that have ended."""


class JobState(StrEnum):
    """Where a job stands."""

    VALIDATING = "validating"
    """Accepted; its data and settings are being read."""
    QUEUED = "queued"
    """Waits for a place in a gang."""
    STARTING = "starting"
    """Holds the lease of a gang that prepares it."""
    RUNNING = "running"
    SAVING = "saving"
    """Leaves its gang with a checkpoint, to pause, stop or make room."""
    MOVING = "moving"
    """Leaves its gang with a checkpoint, to join another."""
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """True of a job that will never train again."""
        return self in OVER

    @property
    def is_live(self) -> bool:
        """True of a job that a gang may hold."""
        return self in LIVE


OVER = frozenset({JobState.FINISHED, JobState.FAILED, JobState.CANCELLED})
LIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.SAVING, JobState.MOVING})


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A job; times are Unix seconds."""

    id: str
    name: str
    state: JobState
    wish: str | None
    """What was asked and is not carried out yet: cancel, pause or resume."""
    step: int
    num_steps: int | None
    tokens: int
    loss: float | None
    error: str | None
    """Why it failed."""
    gang: str | None
    """The super-model that trains it."""
    gang_epoch: int | None
    submitted_at: float
    started_at: float | None
    ended_at: float | None


@dataclass(frozen=True, kw_only=True)
class ShownJob(JobRow):
    """A job as HTTP answers with it."""

    tenant: str | None = None
    waits: str | None = None
    """Why it is still in the queue, where jobs are read."""
    tokens_per_s: float | None = None
    """As measured in its gang; where jobs are read, as the next one."""
    promised_tokens_per_s: float | None = None
    """What the scheduler expects of its gang."""
    disk: dict[str, int] | None = None
    """Bytes of each entry of its folder, in lists that ask for it."""


class Acted(NamedTuple, Generic[T]):
    """What became of a request for many jobs."""

    jobs: list[T]
    """Those that took it, as they are now."""
    refused: dict[str, str]
    """Id of each other one -> why it did not."""


def job_to_dict(job: Any) -> dict[str, Any]:
    """A job, of a store or as a client sees it, as plain values."""
    row = {item.name: getattr(job, item.name) for item in fields(JobRow)}
    return row | {"state": str(job.state)}


def is_address(service: str) -> bool:
    """True of `http://...` and `https://...`: a service over HTTP and no folder."""
    return service.startswith(("http://", "https://"))
