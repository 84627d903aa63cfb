"""The cluster as policies see it: nodes, racks, free GPUs, running groups and quotas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tlora_megatron.scheduler.queue import Group, MayRun, Waiting


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterShape:
    """A cluster of equal nodes in equal racks; GPU `i` is in node `i // gpus_per_node`."""

    num_nodes: int
    gpus_per_node: int
    nodes_per_rack: int

    @property
    def num_gpus(self) -> int:
        """Number of all GPUs."""
        return self.num_nodes * self.gpus_per_node

    def gpus_of(self, node: int) -> range:
        """The GPU numbers of a node."""
        return range(node * self.gpus_per_node, (node + 1) * self.gpus_per_node)

    def rack_of(self, node: int) -> int:
        """The rack of a node."""
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
        """An independent copy."""
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
        """Marks GPUs as held."""
        for gpu in gpus:
            self._free[gpu // self.shape.gpus_per_node].remove(gpu)
            self.num -= 1

    def give(self, gpus: Iterable[int]) -> None:
        """Marks GPUs as free."""
        for gpu in gpus:
            node = self._free[gpu // self.shape.gpus_per_node]
            assert gpu not in node, f"GPU {gpu} must not be freed twice"
            node.append(gpu)
            node.sort()
            self.num += 1


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
        return self._within_quota if self.quotas else None

    def _within_quota(self, waiting: Waiting) -> bool:
        job = waiting.job
        quota = self.quotas.get(job.tenant)
        return quota is None or self.tenant_gpus.get(job.tenant, 0) + job.num_gpus <= quota
