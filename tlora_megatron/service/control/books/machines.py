"""The machines of an engine as the cluster that policies see, and GPUs by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tlora_megatron.scheduler.cluster import ClusterShape
from tlora_megatron.service.engines.protocol import NodeInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """A cluster of equal nodes that holds an engine's machines; what they lack is missing."""

    shape: ClusterShape
    missing: tuple[int, ...]
    """GPU numbers that no machine has, on nodes that are up."""
    down: tuple[int, ...]
    """Nodes that are not healthy, or that the engine has no machine for."""
    hosts: tuple[str, ...] = field(compare=False)
    """Address of each node, empty where there is no machine."""

    @classmethod
    def of(cls, nodes: Sequence[NodeInfo]) -> Machines:
        """The cluster of an engine's nodes.

        Raises:
            ValueError: if there is no GPU and no seat.
        """
        widest = max((node.gpus for node in nodes), default=0)
        if not widest:
            raise ValueError("an engine must have at least one GPU or seat, got none")
        count = 1 + max(node.node for node in nodes)
        shape = ClusterShape(num_nodes=count, gpus_per_node=widest, nodes_per_rack=count)
        known = {node.node: node for node in nodes}
        down = [i for i in range(count) if i not in known or not known[i].healthy]
        missing = [
            gpu for node in nodes if node.healthy for gpu in shape.gpus_of(node.node)[node.gpus :]
        ]
        hosts = tuple(known[i].address if i in known else "" for i in range(count))
        return cls(shape=shape, missing=tuple(missing), down=tuple(down), hosts=hosts)

    def number(self, place: tuple[int, int]) -> int:
        """Cluster-wide number of a node's GPU."""
        node, gpu = place
        return node * self.shape.gpus_per_node + gpu

    def numbers(self, places: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Cluster-wide numbers, ascending."""
        return tuple(sorted(self.number(place) for place in places))

    def places(self, gpus: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Node and GPU of each number."""
        size = self.shape.gpus_per_node
        return tuple((gpu // size, gpu % size) for gpu in gpus)

    def has(self, places: Iterable[tuple[int, int]]) -> bool:
        """True if all these GPUs are there, on nodes that are up."""
        nodes, size = self.shape.num_nodes, self.shape.gpus_per_node
        return all(
            node < nodes
            and gpu < size
            and node not in self.down
            and self.number((node, gpu)) not in self.missing
            for node, gpu in places
        )

    def nodes_of(self, gpus: Iterable[int]) -> set[int]:
        """The nodes that some GPUs are in."""
        return {gpu // self.shape.gpus_per_node for gpu in gpus}
