"""Jobs, waiting and running, as policies see them: immutable, changed only by replacement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tlora_megatron.scheduler.group_throughput import Kinds


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a tenant submitted."""

    index: int
    """Place in the order of submission; breaks every tie."""
    name: str
    base: str
    """Base model; only jobs of one base may train together."""
    kind: int
    """Number of its load in `Speeds`."""
    num_gpus: int
    """GPUs it asks for, and would hold alone."""
    submit_s: float
    isolated_s: float
    """Time it would train alone on `num_gpus`; its size, known from its steps and batch."""
    isolated_tokens_per_s: float
    """Speed alone on `num_gpus`."""
    max_slowdown: float = 1.5
    """Bound on speed alone / speed in a group at any time, and on (end - start) / isolated_s."""
    priority: int = 0
    """Higher goes first."""
    tenant: str = ""
    """Whose quota it counts against."""
    due_s: float = math.inf
    """From then on it goes before all others, and free GPUs are kept for it: nobody starves."""
    state_bytes: float = 0.0
    """Adapter, gradients and optimizer, what a move carries."""
    tokens: float = field(init=False, repr=False)
    """Its work."""
    least_tokens_per_s: float = field(init=False, repr=False)
    """The speed in a group that its bound demands."""

    def __post_init__(self) -> None:
        rate = self.isolated_tokens_per_s
        object.__setattr__(self, "tokens", self.isolated_s * rate)
        object.__setattr__(self, "least_tokens_per_s", rate / self.max_slowdown)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A job without GPUs."""

    job: Job
    tokens_left: float
    queued_s: float
    """When it was submitted, or a failure took its GPUs."""

    @property
    def isolated_left_s(self) -> float:
        """Time that the rest takes alone on the GPUs it asks for."""
        return self.tokens_left / self.job.isolated_tokens_per_s

    @property
    def has_state(self) -> bool:
        """Whether it continues from a checkpoint."""
        return self.tokens_left < self.job.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A job in a group."""

    job: Job
    tokens_per_s: float
    tokens_left: float
    """When the group is ready."""
    started_s: float
    """When it first trained, or after a failure trained again: from here its bound counts."""

    @property
    def deadline_s(self) -> float:
        """When it must have ended for its bound."""
        return self.started_s + self.job.max_slowdown * self.job.isolated_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One super-model and the GPUs it holds. Members' speeds stay as they are until it changes."""

    number: int
    members: tuple[Member, ...]
    gpus: tuple[int, ...]
    """Cluster-wide GPU numbers, ascending."""
    formed_s: float
    ready_s: float
    """When it trains, after the save, move and re-plan that formed it."""
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
        """Members' kinds, ascending."""
        return tuple(sorted([member.job.kind for member in self.members]))

    @property
    def tokens_per_s(self) -> float:
        """Of all members together."""
        return sum([member.tokens_per_s for member in self.members])

    def tokens_left(self, member: Member, now_s: float) -> float:
        """A member's work that is left at `now_s`."""
        trained = member.tokens_per_s * max(0.0, now_s - self.ready_s)
        return max(0.0, member.tokens_left - trained)

    def end_s(self, member: Member) -> float:
        """When a member ends if nothing changes."""
        return self.ready_s + member.tokens_left / member.tokens_per_s
