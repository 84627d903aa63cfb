"""GPUs that get no new group for a day, because gangs died or slowed down on them."""

from __future__ import annotations

from collections.abc import Collection

from tlora_megatron.scheduler.cluster import FreeGpus

DAY_S = 86_400.0
_DEATHS = 2
_MOST_SHARE = 4
"""One in so many GPUs at most: a job that ends its gangs must not close a cluster to the others."""


class SetAside:
    """Takes GPUs out of the free ones as soon as nobody holds them, and gives them back later."""

    def __init__(self, free: FreeGpus) -> None:
        self._free = free
        self._deaths: dict[int, list[float]] = {}
        self.until_s: dict[int, float] = {}
        """End of each GPU's time aside, also of those that a group still holds."""
        self._taken: set[int] = set()

    def died(self, gpu: int, at_s: float) -> bool:
        """Notes that a gang died by its process on a GPU; True if that sets the GPU aside."""
        recent = [s for s in self._deaths.get(gpu, ()) if at_s - s < DAY_S]
        self._deaths[gpu] = [*recent, at_s]
        return len(self._deaths[gpu]) >= _DEATHS and self.put([gpu], at_s)

    def put(self, gpus: Collection[int], at_s: float) -> bool:
        """Sets GPUs aside for a day; False if these would be too many of the cluster's."""
        new = set(gpus) - set(self.until_s)
        if not new or _MOST_SHARE * len(new | set(self.until_s)) > self._free.shape.num_gpus:
            return False
        self.until_s.update(dict.fromkeys(new, at_s + DAY_S))
        return True

    def sweep(self, now_s: float) -> bool:
        """Takes what became free, and returns True if it gave back what has waited for a day."""
        size = self._free.shape.gpus_per_node
        over = {gpu for gpu, until_s in self.until_s.items() if until_s <= now_s}
        for gpu in over:
            del self.until_s[gpu]
        back = sorted(self._taken & over)
        self._taken -= over
        self._free.give(back)
        held = set(self.until_s) - self._taken
        found = {gpu for gpu in held if gpu in self._free.in_node(gpu // size)}
        self._free.take(sorted(found))
        self._taken |= found
        return bool(back)
