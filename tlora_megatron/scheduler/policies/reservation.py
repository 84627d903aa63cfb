"""Nodes that are kept for a job past its due time, so that it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tlora_megatron.scheduler.cluster import ClusterShape, FreeGpus
from tlora_megatron.scheduler.jobs import Group


def soonest_nodes(
    num_gpus: int, shape: ClusterShape, free: FreeGpus, groups: Iterable[Group], taken: set[int]
) -> tuple[tuple[int, ...], float]:
    """The nodes, none of `taken`, on which `num_gpus` GPUs become free first, and when.

    What starts there afterwards must have ended by then, and nothing there may grow; so that time
    only gets nearer. No nodes, at time 0, where too few are left.
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
    """By node: when how many GPUs are given back."""
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
    """When so many GPUs of a node are free; None for a node that is down."""
    if free >= needed:
        return 0.0
    for end_s, num in releases:
        free += num
        if free >= needed:
            return end_s
    return None
