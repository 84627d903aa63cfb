"""Jobs and gangs as a controller keeps them in memory; the store's rows are the truth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.scheduler.jobs import Job
from tlora_megatron.service.control.actions import GangNow, Phase
from tlora_megatron.service.store import JobState

ALONE = " // "
"""Between base and id in the name of the pool of a job that shares a gang with nobody."""

Intent = Literal["move", "pause", "cancel"]
"""Why a job leaves its gang."""


@dataclass(kw_only=True, slots=True)
class LiveJob:
    """A job that is not over."""

    id: str
    number: int
    """Grows with submission; the scheduler's index."""
    name: str
    tenant: str
    base: str
    """Jobs of equal bases may share a gang."""
    state: JobState
    wish: str | None = None
    num_gpus: int = 1
    max_slowdown: float = 1.5
    priority: int = 0
    submitted_at: float = 0.0
    started_at: float | None = None
    load: JobLoad | None = None
    """None until it is validated."""
    tokens: float = 0.0
    """Rows of all its steps together."""
    step: int = 0
    num_steps: int = 0
    alone: bool = False
    """It shares a gang with nobody, after it made one fail."""
    deaths: int = 0
    """Gangs that died with it since its last step."""
    failed_saves: int = 0
    priced: Job | None = None
    """As the scheduler sees it."""

    @property
    def pool(self) -> str:
        """Name of the base model for the scheduler: a job that must be alone has one of its own."""
        return f"{self.base}{ALONE}{self.id}" if self.alone else self.base

    @property
    def share_left(self) -> float:
        """Share of its work that is left."""
        return max(0.0, 1.0 - self.step / self.num_steps) if self.num_steps else 1.0

    @property
    def intent(self) -> Intent:
        """Why it leaves a gang, by what its user wishes."""
        return "cancel" if self.wish == "cancel" else "pause" if self.wish == "pause" else "move"


@dataclass(kw_only=True, slots=True)
class Seat:
    """A job's place in a gang."""

    phase: Phase
    lease: int


@dataclass(kw_only=True, slots=True)
class LiveGang:
    """A gang of which some process may still live."""

    name: str
    epoch: int
    pool: str
    gpus: tuple[int, ...]
    """Cluster-wide numbers, ascending; none if a machine is gone on which it ran."""
    plan: Plan | None
    state: Literal["starting", "running", "stopping"]
    since_s: float
    """When it came into this state."""
    heard_s: float
    idle_since_s: float
    heard: int = 0
    """Number of its last event that was heard."""
    seats: dict[str, Seat] = field(default_factory=dict)
    in_first_round: set[str] = field(default_factory=set)
    changed: bool = True
    """Members came or went since the last report of its speed."""
    rounds: int = 0
    """Rounds since its start that it has told of."""
    speeds: list[float] = field(default_factory=list)
    """Its last tokens per second, since its members changed."""
    lease_until_s: float = 0.0
    spoken_s: float = 0.0
    """When it was last sent a command."""
    no_proof: str | None = None
    """Why it was killed, where the engine cannot prove that it is gone."""

    def now(self, now_s: float) -> GangNow:
        """The gang's present state, as `next_actions` takes it."""
        return GangNow(
            gang=self.name,
            gpus=self.gpus,
            state=self.state,
            seats={job: seat.phase for job, seat in self.seats.items()},
            idle_s=0.0 if self.seats else now_s - self.idle_since_s,
            in_first_round=frozenset(self.in_first_round),
        )
