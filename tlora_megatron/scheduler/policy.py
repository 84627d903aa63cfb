"""The interface of a scheduling policy: a pure function from jobs and cluster to decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.queue import Group, Job, WaitingQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Changes since the last decision, which let a policy skip what it has already refused."""

    arrived: frozenset[int]
    """Indices of the waiting jobs that no decision has seen yet."""
    regrouped: frozenset[int]
    """Numbers of the running groups that lost members."""
    freed: bool
    """True if GPUs became free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Forms one group. Each member of a dissolved group is named once in the list of decisions."""

    members: tuple[int, ...]
    """Job indices, ascending."""
    gpus: tuple[int, ...]
    """GPU numbers of the new group, ascending."""
    dissolve: tuple[int, ...] = ()
    """Numbers of running groups to end before any group of the list of decisions is formed."""
    pause: tuple[int, ...] = ()
    """Members of dissolved groups that wait from now on, to come back to their GPUs in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupCost:
    """Pauses of a group that is formed from running ones."""

    admit_s: float = 1.0
    """Pause when a job joins a running group on the same GPUs: allocation, data, first compile."""
    replan_s: float = 10.0
    """Pause when a group gets other GPUs: plan, process groups, warm-up."""
    state_bytes_per_s: float = 1.0e9
    """Speed of saving and loading adapters and optimizer state."""
    weights_bytes_per_s: float = 2.0e9
    """Speed of loading the base model onto GPUs that did not hold it."""
    weights_bytes: Mapping[str, float] = field(default_factory=dict)
    """Size of each base model, by name."""

    def save_s(self, jobs: list[Job]) -> float:
        """Seconds in which the state of jobs is saved, before others get their GPUs."""
        return sum(job.state_bytes for job in jobs) / self.state_bytes_per_s

    def pause_s(self, sources: tuple[Group, ...], gpus: tuple[int, ...], moved: list[Job]) -> float:
        """Pause of a new group in seconds.

        Args:
            sources: the groups it is formed from.
            gpus: its GPUs.
            moved: jobs whose state comes from elsewhere: other groups, or checkpoints.

        A group formed from nothing costs 0: the start is part of the duration a trace records.
        """
        if not sources and not moved:
            return 0.0
        carry = sum(job.state_bytes for job in moved) / self.state_bytes_per_s
        if any(source.gpus == gpus for source in sources):
            return self.admit_s + carry
        base = sources[0].base if sources else moved[0].base
        held = {gpu for source in sources for gpu in source.gpus}
        load = 0.0
        if not held.issuperset(gpus):
            load = self.weights_bytes.get(base, 0.0) / self.weights_bytes_per_s
        return self.replan_s + carry + load


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Settings that all policies share."""

    lookahead: int = 128
    """Number of waiting jobs that a decision looks at, from the front of the queue."""
    max_group_size: int = 16
    """Most members of a group."""
    min_gain: float = 0.01
    """Smallest relative gain in tokens per second for which groups are changed."""
    keep_bounds: bool = True
    """Keep slowdown bounds, in the policies that know them; False is an ablation."""
    use_residual: bool = True
    """Add waiting jobs to running groups with residual capacity; False is an ablation."""
    cost: RegroupCost = field(default_factory=RegroupCost)


class Policy(Protocol):
    """Decides which groups to form; keeps no state between calls."""

    @property
    def keeps_bounds(self) -> bool:
        """True if every job's slowdown stays within its bound."""

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Groups to form now, all together. Reads its arguments and changes none of them."""
