"""Chooses the nodes that are reserved for an overdue job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tlora_megatron.scheduler.cluster import ClusterShape, FreeGpus
from tlora_megatron.scheduler.jobs import Group


def soonest_nodes(
    num_gpus: int, shape: ClusterShape, free: FreeGpus, groups: Iterable[Group], taken: set[int]
) -> tuple[tuple[int, ...], float]:
    """The nodes on which `num_gpus` GPUs become free first, and the time at which they do.

    Nodes in `taken` are left out. The time holds as long as whatever starts on these nodes ends
    before it and no group there grows. Returns no nodes and time 0 if too few nodes are left.
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
