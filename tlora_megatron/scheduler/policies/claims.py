"""GPUs to which paused jobs come back: jobs that train there meanwhile must end in time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from tlora_megatron.scheduler.cluster import FreeGpus
from tlora_megatron.scheduler.jobs import Waiting


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
        """When a paused job needs one of these GPUs; infinite if none does.

        Args:
            without: jobs whose own claims do not count.
        """
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
