"""What policies see of a cluster, the rules they keep, and the decisions they answer with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from tlora_megatron.scheduler.queue import Group, Job, MayRun, Waiting, WaitingQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterShape:
    """A cluster of equal nodes in equal racks; GPU `i` is in node `i // gpus_per_node`."""

    num_nodes: int
    gpus_per_node: int
    nodes_per_rack: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def gpus_of(self, node: int) -> range:
        return range(node * self.gpus_per_node, (node + 1) * self.gpus_per_node)

    def rack_of(self, node: int) -> int:
        return node // self.nodes_per_rack

    def tier(self, gpus: Iterable[int]) -> int:
        """The span of some GPUs: 0 for one node, 1 for one rack, 2 for more."""
        nodes = {gpu // self.gpus_per_node for gpu in gpus}
        if len(nodes) == 1:
            return 0
        return 1 if len({self.rack_of(node) for node in nodes}) == 1 else 2


class FreeGpus:
    """The free GPUs by node, and the one rule by which they are given out.

    A group that fits on one node gets its GPUs from the fullest node that has them. A larger one
    gets whole nodes and the rest on one more node, all in one rack if a rack has them. So the size
    of a group determines the links between its GPUs.
    """

    def __init__(self, shape: ClusterShape, free: Iterable[Iterable[int]]) -> None:
        self.shape = shape
        self._free = [list(node) for node in free]
        self.num = sum(map(len, self._free))

    @classmethod
    def all_of(cls, shape: ClusterShape) -> FreeGpus:
        """The free GPUs of an empty cluster: all of them."""
        return cls(shape, [shape.gpus_of(node) for node in range(shape.num_nodes)])

    def copy(self) -> FreeGpus:
        return FreeGpus(self.shape, self._free)

    def in_node(self, node: int) -> tuple[int, ...]:
        """The free GPUs of a node, ascending."""
        return tuple(self._free[node])

    def holds(self, gpus: Iterable[int]) -> bool:
        """True if all these GPUs are free."""
        size = self.shape.gpus_per_node
        return all(gpu in self._free[gpu // size] for gpu in gpus)

    def find(self, num: int) -> tuple[int, ...] | None:
        """Chooses `num` GPUs, ascending, without taking them; None if there are too few."""
        if num > self.num:
            return None
        size = self.shape.gpus_per_node
        if num <= size:
            return self._find_in_node(num, ())
        whole = [node for node, free in enumerate(self._free) if len(free) == size]
        count, rest = divmod(num, size)
        if len(whole) < count:
            return None
        for nodes in self._node_sets(whole, count):
            gpus = [gpu for node in nodes for gpu in self._free[node]]
            tail = self._find_in_node(rest, nodes) if rest else ()
            if tail is not None:
                return tuple(sorted([*gpus, *tail]))
        return None

    def _node_sets(self, whole: list[int], count: int) -> list[list[int]]:
        """Choices of `count` whole nodes: first those within one rack, then the first anywhere."""
        racks: dict[int, list[int]] = {}
        for node in whole:
            racks.setdefault(self.shape.rack_of(node), []).append(node)
        return [r[:count] for r in racks.values() if len(r) >= count] + [whole[:count]]

    def _find_in_node(self, num: int, without: Iterable[int]) -> tuple[int, ...] | None:
        best, best_len = -1, 1 << 30
        for node, free in enumerate(self._free):
            if num <= len(free) < best_len and node not in without:
                best, best_len = node, len(free)
        return None if best < 0 else tuple(self._free[best][:num])

    def take(self, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            self._free[gpu // self.shape.gpus_per_node].remove(gpu)
            self.num -= 1

    def give(self, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            node = self._free[gpu // self.shape.gpus_per_node]
            assert gpu not in node, f"GPU {gpu} must not be freed twice"
            node.append(gpu)
            node.sort()
            self.num += 1


def soonest_nodes(
    num_gpus: int, shape: ClusterShape, free: FreeGpus, groups: Iterable[Group], taken: set[int]
) -> tuple[tuple[int, ...], float]:
    """The nodes on which `num_gpus` GPUs become free first, and when; none and 0 if none.

    The time holds as long as what starts there ends before it and no group there grows.
    """
    size = shape.gpus_per_node
    needed = min(num_gpus, size)
    count = -(-num_gpus // size)
    releases = _releases(shape, groups)
    ready = []
    for node in range(shape.num_nodes):
        if node not in taken:
            free_s = _free_from(needed, len(free.in_node(node)), sorted(releases[node]))
            if free_s is not None:
                ready.append((free_s, node))
    if len(ready) < count:
        return (), 0.0
    chosen = sorted(ready)[:count]
    return tuple(sorted(node for _, node in chosen)), chosen[-1][0]


def _releases(shape: ClusterShape, groups: Iterable[Group]) -> list[list[tuple[float, int]]]:
    """For each node, pairs of (time, number of GPUs that a group gives back then)."""
    size = shape.gpus_per_node
    releases: list[list[tuple[float, int]]] = [[] for _ in range(shape.num_nodes)]
    for group in groups:
        gpus = group.gpus
        if gpus[0] // size == gpus[-1] // size:
            releases[gpus[0] // size].append((group.last_end_s, len(gpus)))
            continue
        for node, num in Counter(gpu // size for gpu in gpus).items():
            releases[node].append((group.last_end_s, num))
    return releases


def _free_from(needed: int, free: int, releases: list[tuple[float, int]]) -> float | None:
    """The time at which `needed` GPUs of a node are free; None for a node that is down."""
    if free >= needed:
        return 0.0
    for end_s, num in releases:
        free += num
        if free >= needed:
            return end_s
    return None


@dataclass(kw_only=True, slots=True)
class ClusterState:
    """The state of the cluster at one moment. Policies only read it; the simulator changes it."""

    shape: ClusterShape
    free: FreeGpus
    groups: dict[int, Group] = field(default_factory=dict)
    """Running groups by number."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Most GPUs that a tenant's running jobs may ask for together; no entry: no limit."""
    tenant_gpus: dict[str, int] = field(default_factory=dict)
    """GPUs that each tenant's running jobs ask for now."""

    @property
    def may_run(self) -> MayRun:
        """Tests whether a quota lets a waiting job run; None without quotas."""
        return self.within_quota if self.quotas else None

    def within_quota(self, waiting: Waiting, further: int = 0) -> bool:
        """True if the quota of a job's tenant has room for it beside `further` GPUs."""
        job = waiting.job
        quota = self.quotas.get(job.tenant)
        held = self.tenant_gpus.get(job.tenant, 0) + further
        return quota is None or held + job.num_gpus <= quota


@dataclass(kw_only=True, slots=True)
class Changes:
    """Changes since the last decision, which let a policy skip what it has already refused."""

    arrived: set[int] = field(default_factory=set)
    """Indices of the waiting jobs that no decision has seen yet."""
    regrouped: set[int] = field(default_factory=set)
    """Numbers of the running groups that lost members."""
    freed: bool = True
    """True if GPUs became free."""

    def take(self) -> Changes:
        """Returns the changes so far and begins anew."""
        changes = replace(self)
        self.arrived, self.regrouped, self.freed = set(), set(), False
        return changes


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
        """Pause in seconds of a new group, whose moved jobs' state comes from elsewhere.

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


NO_COST = RegroupCost(
    admit_s=0.0, replan_s=0.0, state_bytes_per_s=math.inf, weights_bytes_per_s=math.inf
)
"""No change of a group costs time."""


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
    held: frozenset[int] = frozenset()
    """Numbers of groups that may not move now; jobs may join them."""


class Policy(Protocol):
    """Decides which groups to form; keeps no state between calls."""

    @property
    def keeps_bounds(self) -> bool:
        """True if every job's slowdown stays within its bound."""

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Groups to form now, all together. Reads its arguments and changes none of them."""
