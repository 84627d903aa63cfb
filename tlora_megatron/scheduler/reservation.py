"""Nodes that are kept for a job past its due time, so that it starts."""

from __future__ import annotations

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
    releases: dict[int, list[tuple[float, int]]] = {}
    for group in groups:
        held: dict[int, int] = {}
        for gpu in group.gpus:
            held[gpu // size] = held.get(gpu // size, 0) + 1
        end_s = group.last_end_s
        for node, num in held.items():
            releases.setdefault(node, []).append((end_s, num))
    ready = []
    for node in range(shape.num_nodes):
        free_s = _free_from(needed, len(free.in_node(node)), sorted(releases.get(node, ())))
        if node not in taken and free_s is not None:
            ready.append((free_s, node))
    if len(ready) < count:
        return (), 0.0
    chosen = sorted(ready)[:count]
    return tuple(sorted(node for _, node in chosen)), chosen[-1][0]


def _free_from(needed: int, free: int, releases: list[tuple[float, int]]) -> float | None:
    """When so many GPUs of a node are free; None for a node that is down."""
    if free >= needed:
        return 0.0
    for end_s, num in releases:
        free += num
        if free >= needed:
            return end_s
    return None
