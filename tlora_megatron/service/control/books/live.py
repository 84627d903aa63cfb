"""Jobs and gangs as a controller keeps them in memory; the store's rows are the truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.scheduler.jobs import Job
from tlora_megatron.service.control.actions import GangNow, Phase
from tlora_megatron.service.store import JobState

ALONE = " // "
"""Between base and id in the name of the pool of a job that shares a gang with nobody."""

_NEXT_S, _GATHER_S = 0.5, 3.0
"""A gang's first jobs join together if each is prepared so soon behind the last one, and all of
them within the time of a first round on a GPU (2.3 to 3.8 s on an H200)."""

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
    """Rows of all its steps together; of a job that a client drives, of those it has made."""
    step: int = 0
    num_steps: int = 0
    alone: bool = False
    """It shares a gang with nobody, after it made one fail."""
    deaths: int = 0
    """Gangs that died with it since its last step."""
    failed_saves: int = 0
    pause: Mapping[str, Any] | None = None
    """Where and until when it comes back after a decision has paused it, as its row keeps it."""
    priced: Job | None = None
    """The job in the scheduler's own form."""

    @property
    def pool(self) -> str:
        """Name of the base model for the scheduler: a job that must be alone has one of its own."""
        return f"{self.base}{ALONE}{self.id}" if self.alone else self.base

    @property
    def is_open(self) -> bool:
        """True if a client drives it."""
        return self.load is not None and self.load.is_open

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
    told: dict[str, float] = field(default_factory=dict)
    """Tokens per second of each job in its last report."""
    told_steady: bool = False
    """Its members were the same all the time of that report."""
    lease_until_s: float = 0.0
    spoken_s: float = 0.0
    """When it was last sent a command."""
    no_proof: str | None = None
    """Why it was killed, where the engine cannot prove that it is gone."""
    is_fresh: bool = False
    """No job has joined it since it started."""
    gathers_from_s: float = math.inf
    gathers_until_s: float = -math.inf

    def gather(self, now_s: float) -> None:
        """Lets a fresh gang's first jobs, one of which is prepared now, join together.

        The first round of a process takes seconds on a GPU, and who comes after its begin waits for
        its end.
        """
        if self.is_fresh:
            self.gathers_from_s = min(self.gathers_from_s, now_s)
            most_s = self.gathers_from_s + _GATHER_S
            self.gathers_until_s = min(now_s + _NEXT_S, most_s)

    def joined(self) -> None:
        """Ends the gathering."""
        self.is_fresh, self.gathers_until_s = False, -math.inf

    def now(self, now_s: float) -> GangNow:
        """The gang's present state, as `next_actions` takes it."""
        return GangNow(
            gang=self.name,
            gpus=self.gpus,
            state=self.state,
            seats={job: seat.phase for job, seat in self.seats.items()},
            idle_s=0.0 if self.seats else now_s - self.idle_since_s,
            in_first_round=frozenset(self.in_first_round),
            gathers=now_s < self.gathers_until_s,
        )
