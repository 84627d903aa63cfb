"""The waiting jobs, kept sorted in the orders that policies ask for."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from tlora_megatron.scheduler.jobs import Waiting

_Key = tuple[float, float, int]
MayRun = Callable[[Waiting], bool] | None
"""Test that leaves out jobs held back by a quota; None: no job is held back."""


def _by_arrival(waiting: Waiting) -> _Key:
    job = waiting.job
    return (-job.priority, job.submit_s, job.index)


def _by_size(waiting: Waiting) -> _Key:
    left_s = 0.0 if waiting.job.is_open else waiting.isolated_left_s  # its client waits
    return (-waiting.job.priority, left_s, waiting.job.index)


def _by_due(waiting: Waiting) -> _Key:
    return (waiting.job.due_s, waiting.job.submit_s, waiting.job.index)


class WaitingQueue:
    """The jobs that hold no GPUs. Policies only read it; the simulator adds and removes jobs."""

    def __init__(self, waiting: Iterable[Waiting] = ()) -> None:
        self._entries: dict[int, Waiting] = {}
        self._orders: dict[str, list[_Key]] = {"arrival": [], "size": [], "due": []}
        self._paused: set[int] = set()
        for entry in waiting:
            self.add(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, index: int) -> bool:
        return index in self._entries

    def __getitem__(self, index: int) -> Waiting:
        return self._entries[index]

    def copy(self) -> WaitingQueue:
        """An independent copy."""
        queue = WaitingQueue()
        queue._entries = dict(self._entries)
        queue._orders = {name: list(order) for name, order in self._orders.items()}
        queue._paused = set(self._paused)
        return queue

    def add(self, waiting: Waiting) -> None:
        """Adds a job."""
        index = waiting.job.index
        assert index not in self._entries, f"job {index} must not wait twice"
        self._entries[index] = waiting
        if waiting.pause is not None:
            self._paused.add(index)
        for name, key in _KEYS.items():
            insort(self._orders[name], key(waiting))

    def remove(self, index: int) -> Waiting:
        """Removes a job and returns it."""
        waiting = self._entries.pop(index)
        self._paused.discard(index)
        for name, key in _KEYS.items():
            order = self._orders[name]
            place = bisect_left(order, key(waiting))
            assert order[place][2] == index, "orders must hold every waiting job"
            del order[place]
        return waiting

    def paused(self) -> list[Waiting]:
        """The jobs that were running and are to come back, in order of submission."""
        return [self._entries[index] for index in sorted(self._paused)]

    def needed_s(self, gpus: Iterable[int] | None = None, without: Collection[int] = ()) -> float:
        """When a paused job comes back to one of these GPUs; infinite if there is none.

        Args:
            gpus: None: to any.
            without: jobs that do not count.
        """
        pauses = [self._entries[index].pause for index in self._paused if index not in without]
        found = [pause for pause in pauses if pause is not None]
        if gpus is not None:
            wanted = set(gpus)
            found = [pause for pause in found if not wanted.isdisjoint(pause.gpus)]
        return min((pause.back_by_s for pause in found), default=math.inf)

    def by_arrival(self, limit: int, may_run: MayRun = None) -> list[Waiting]:
        """The first `limit` jobs that may run, by priority, then submission."""
        return self._first("arrival", limit, may_run)

    def by_size(self, limit: int, may_run: MayRun = None) -> list[Waiting]:
        """The first `limit` jobs that may run, by priority, then remaining time alone."""
        return self._first("size", limit, may_run)

    def overdue(self, now_s: float, limit: int, may_run: MayRun = None) -> list[Waiting]:
        """The first `limit` jobs that may run and are overdue at `now_s`, longest overdue first."""
        order = self._orders["due"]
        if not order or order[0][0] > now_s:
            return []
        return [e for e in self._first("due", limit, may_run) if e.job.due_s <= now_s]

    def _first(self, order: str, limit: int, may_run: MayRun) -> list[Waiting]:
        entries, keys = self._entries, self._orders[order]
        if may_run is None:
            return [entries[key[2]] for key in keys[:limit]]
        return list(islice(filter(may_run, (entries[key[2]] for key in keys)), limit))


_KEYS = {"arrival": _by_arrival, "size": _by_size, "due": _by_due}
