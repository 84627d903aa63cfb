"""Waiting and running jobs as policies see them: immutable values, changed by replacement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tlora_megatron.scheduler.group_throughput import Kinds


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as its tenant submitted it."""

    index: int
    """Position in the order of submission; breaks every tie."""
    name: str
    base: str
    """Name of the base model; only jobs of the same base model may train together."""
    kind: int
    """Number of its base model and load in `Speeds`."""
    num_gpus: int
    """Number of GPUs it asks for, and would hold if it trained alone."""
    submit_s: float
    isolated_s: float
    """Time it would train alone on `num_gpus` GPUs, known from its steps and batch."""
    isolated_tokens_per_s: float
    """Speed alone on `num_gpus` GPUs."""
    max_slowdown: float = 1.5
    """Bound on (speed alone) / (speed in a group), and on (end - start) / isolated_s."""
    priority: int = 0
    """Jobs of higher priority go first."""
    tenant: str = ""
    """Tenant whose quota it counts against."""
    due_s: float = math.inf
    """Time from which it goes before all others and nodes are reserved for it: no job starves."""
    is_open: bool = False
    """A client drives it: when it has work and when it ends is unknown, so that no bound holds for
    it, and it is assumed to slow no other job."""
    state_bytes: float = 0.0
    """Size of adapter, gradients and optimizer state, which a move must copy."""
    tokens: float = field(init=False, repr=False)
    """Its work in tokens."""
    least_tokens_per_s: float = field(init=False, repr=False)
    """The least speed in a group that its bound allows."""

    def deadline_s(self, start_s: float, end_s: float) -> float:
        """The time by which a job must end that starts now, whatever happens to it later.

        Its bound counts from its submission, if it can still be kept as the job starts; one that
        has waited too long for that has the bound from its start on.

        Args:
            start_s: when it begins to train.
            end_s: when it would end if nothing changed.
        """
        if self.is_open:
            return math.inf
        allowed_s = self.max_slowdown * self.isolated_s
        by_s = self.submit_s + allowed_s
        return by_s if end_s <= by_s else start_s + allowed_s

    def __post_init__(self) -> None:
        rate = self.isolated_tokens_per_s
        object.__setattr__(self, "tokens", self.isolated_s * rate)
        least = 0.0 if self.is_open else rate / self.max_slowdown
        object.__setattr__(self, "least_tokens_per_s", least)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A job that was running, and its right to come back: others on its GPUs end in time for it."""

    gpus: tuple[int, ...]
    """Those that it held."""
    back_by_s: float
    """The last time at which it may begin to move back and still end within its bound."""
    started_s: float
    """When it first trained."""
    deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A job that holds no GPUs."""

    job: Job
    tokens_left: float
    queued_s: float
    """When it was submitted, or when a failed node put it back into the queue."""
    pause: Pause | None = None
    """None unless a decision has paused it."""

    @property
    def isolated_left_s(self) -> float:
        """Time that its remaining work takes alone on the GPUs it asks for."""
        return self.tokens_left / self.job.isolated_tokens_per_s

    @property
    def has_state(self) -> bool:
        """True if it continues from a checkpoint."""
        return self.tokens_left < self.job.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A job in a running group."""

    job: Job
    tokens_per_s: float
    tokens_left: float
    """Work that is left at the time the group is ready."""
    started_s: float
    """When it first trained, or trained again after a failure."""
    deadline_s: float
    """The time by which its bound demands that it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Jobs that train as one super-model, and the GPUs they hold; speeds are constant."""

    number: int
    members: tuple[Member, ...]
    gpus: tuple[int, ...]
    """Cluster-wide GPU numbers, ascending."""
    formed_s: float
    ready_s: float
    """When it begins to train, after the save, move and re-plan that formed it."""
    last_end_s: float = field(init=False, repr=False, compare=False)
    """When its GPUs become free if nothing changes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_end_s", max([self.end_s(m) for m in self.members]))

    @property
    def base(self) -> str:
        """Base model of all members."""
        return self.members[0].job.base

    @property
    def kinds(self) -> Kinds:
        """The members' kinds, ascending."""
        return tuple(sorted([member.job.kind for member in self.members]))

    @property
    def tokens_per_s(self) -> float:
        """Speed of all members together."""
        return sum([member.tokens_per_s for member in self.members])

    def tokens_left(self, member: Member, now_s: float) -> float:
        """Work of a member that is left at `now_s`."""
        trained = member.tokens_per_s * max(0.0, now_s - self.ready_s)
        return max(0.0, member.tokens_left - trained)

    def end_s(self, member: Member) -> float:
        """When a member ends if nothing changes."""
        return self.ready_s + member.tokens_left / member.tokens_per_s
