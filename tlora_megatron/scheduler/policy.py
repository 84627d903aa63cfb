"""What a policy is: a pure function from what waits and runs to decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.jobs import Group, Job
from tlora_megatron.scheduler.queue import WaitingQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Forms one group. Each member of a dissolved group is named by one decision of the list."""

    members: tuple[int, ...]
    """Job indices, ascending."""
    gpus: tuple[int, ...]
    dissolve: tuple[int, ...] = ()
    """Numbers of running groups that end first; all of a list's are dissolved before any forms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupCost:
    """Time that a group stands still when it is formed from running ones."""

    admit_s: float = 1.0
    """A job joins a running super-model on the same GPUs: slab, data, first compile."""
    replan_s: float = 10.0
    """Other GPUs: plan, process groups, warm-up."""
    state_bytes_per_s: float = 1.0e9
    """Saving and loading of adapters and optimizer state."""
    weights_bytes_per_s: float = 2.0e9
    """Loading of the base onto GPUs that did not hold it."""
    weights_bytes: Mapping[str, float] = field(default_factory=dict)
    """Size of each base model."""

    def pause_s(self, sources: tuple[Group, ...], gpus: tuple[int, ...], moved: list[Job]) -> float:
        """Pause of a new group.

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
    """What all policies share."""

    lookahead: int = 128
    """Waiting jobs that a decision looks at, from the front of the queue."""
    max_group_size: int = 16
    """Members of a group."""
    min_gain: float = 0.01
    """Relative gain in tokens per second below which groups are left alone."""
    keep_bounds: bool = True
    """Whether slowdown bounds are kept (policies that know them); False is an ablation."""
    use_residual: bool = True
    """Whether jobs go to running groups' residual capacity; False is an ablation."""
    cost: RegroupCost = field(default_factory=RegroupCost)


class Policy(Protocol):
    """Decides; holds nothing between calls."""

    @property
    def keeps_bounds(self) -> bool:
        """Whether every slowdown stays within its bound."""

    def decide(self, now_s: float, jobs: WaitingQueue, cluster: ClusterState) -> list[Decision]:
        """Groups to form now, to be carried out together. Reads its arguments, changes none."""
