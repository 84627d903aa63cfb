"""GPUs that are held back: for paused jobs that come back, and for a job that is overdue."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from tlora_megatron.scheduler.policy import ClusterShape, FreeGpus
from tlora_megatron.scheduler.queue import Group, Waiting


class Claims:
    """The GPUs of paused jobs, and when each is needed again at the latest."""

    def __init__(self, paused: Iterable[Waiting] = ()) -> None:
        self._pauses: dict[int, tuple[int, ...]] = {}
        self._back_by_s: dict[int, dict[int, float]] = {}
        """GPU -> job -> when it must have the GPU."""
        for waiting in paused:
            self.add(waiting)

    def add(self, waiting: Waiting) -> None:
        """Enters a job that is paused."""
        assert waiting.pause is not None, "only a paused job has a claim"
        index, pause = waiting.job.index, waiting.pause
        self._pauses[index] = pause.gpus
        for gpu in pause.gpus:
            self._back_by_s.setdefault(gpu, {})[index] = pause.back_by_s

    def drop(self, index: int) -> None:
        """Forgets a job that trains again, wherever that is."""
        for gpu in self._pauses.pop(index, ()):
            del self._back_by_s[gpu][index]
            if not self._back_by_s[gpu]:
                del self._back_by_s[gpu]

    def needed_s(self, gpus: Iterable[int], without: Collection[int] = ()) -> float:
        """When a paused job, but those left out, needs one of these GPUs; infinite if none does."""
        if not self._back_by_s:
            return math.inf
        return min(
            (
                back_by_s
                for gpu in gpus
                for index, back_by_s in self._back_by_s.get(gpu, {}).items()
                if index not in without
            ),
            default=math.inf,
        )

    def first_choices(self, free: FreeGpus) -> Iterator[FreeGpus]:
        """The free GPUs without a claim, then all of them."""
        if self._back_by_s:
            nodes = map(free.in_node, range(free.shape.num_nodes))
            yield FreeGpus(
                free.shape, [[g for g in gpus if g not in self._back_by_s] for gpus in nodes]
            )
        yield free


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
