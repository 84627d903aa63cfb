"""Estimates what ideal resizing and pre-emption would bring: malleable shortest remaining time.

Every job trains alone on a power of two of the GPUs. Whenever one comes or ends, GPUs are shared
out anew: the job with the least time left is served first, on the number of GPUs that suits it and
those behind it. A change costs a pause. Placement, memory of nodes, slowdown bounds, quotas and
fusing are ignored, and nothing says that this order is the best, so this is no bound.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Job

_PAUSE_S = 60.0
_EXPECTED = 0.05
"""Added to the number of jobs that wait, so that no job takes GPUs that bring it nothing."""
_WORTH_A_GPU = 0.1
"""Share of a pause that each further GPU must save."""
_DONE = 1e-9
"""Share of a job's work that counts as none left."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Task:
    """A job, what is left of it, and the GPUs that it has."""

    index: int
    submit_s: float
    tokens: float
    left: float
    rates: Mapping[int, float]
    fastest: float
    gpus: int = 0
    ready_s: float = 0.0

    @property
    def place(self) -> tuple[float, int]:
        """Its place in the order: the least time left first."""
        return self.left / self.fastest, self.index

    def end_s(self, now_s: float) -> float:
        """When it ends on its GPUs."""
        return max(now_s, self.ready_s) + self.left / self.rates[self.gpus]


def malleable_mean_jct_s(
    jobs: Sequence[Job], speeds: Speeds, num_gpus: int, pause_s: float = _PAUSE_S
) -> float:
    """Mean time from submission to end, in order of submission."""
    return _Cluster(jobs, speeds, num_gpus, pause_s).mean_jct_s()


class _Cluster:
    """The state between two events: who trains on how many GPUs, and who waits."""

    def __init__(self, jobs: Sequence[Job], speeds: Speeds, num_gpus: int, pause_s: float) -> None:
        self._jobs = jobs
        self._speeds = speeds
        self._num_gpus = num_gpus
        self._pause_s = pause_s
        self._running: list[_Task] = []
        self._waiting: list[tuple[tuple[float, int], _Task]] = []
        """In order; the time left of those who wait does not change."""

    def mean_jct_s(self) -> float:
        """Serves all jobs."""
        total_s, now_s, come = 0.0, 0.0, 0
        while come < len(self._jobs) or self._running or self._waiting:
            then_s = min([task.end_s(now_s) for task in self._running], default=math.inf)
            if come < len(self._jobs):
                then_s = min(then_s, self._jobs[come].submit_s)
            for task in self._train(now_s, then_s):
                total_s += then_s - task.submit_s
            now_s = then_s
            while come < len(self._jobs) and self._jobs[come].submit_s <= now_s:
                self._wait(self._task(self._jobs[come]))
                come += 1
            self._apply(self._shares(), now_s)
        return total_s / max(1, len(self._jobs))

    def _task(self, job: Job) -> _Task:
        rates = self._speeds.sizes(job.kind, self._num_gpus)
        return _Task(
            index=job.index,
            submit_s=job.submit_s,
            tokens=job.tokens,
            left=job.tokens,
            rates=rates,
            fastest=max(rates.values()),
        )

    def _wait(self, task: _Task) -> None:
        insort(self._waiting, (task.place, task))

    def _train(self, now_s: float, then_s: float) -> list[_Task]:
        """Trains until `then_s`, and returns the jobs that end then."""
        for task in self._running:
            ran_s = max(0.0, then_s - max(now_s, task.ready_s))
            task.left -= task.rates[task.gpus] * ran_s
        ended = [task for task in self._running if task.left <= _DONE * task.tokens]
        self._running = [task for task in self._running if task.left > _DONE * task.tokens]
        return ended

    def _in_order(self) -> Iterator[_Task]:
        running = sorted((task.place, task) for task in self._running)
        return (task for _, task in heapq.merge(running, self._waiting))

    def _shares(self) -> dict[_Task, int]:
        """GPUs for each job that is to train now."""
        shares: dict[_Task, int] = {}
        free, behind = self._num_gpus, len(self._running) + len(self._waiting)
        for task in self._in_order():
            behind -= 1
            if size := self._size(task, free, behind):
                shares[task] = size
                free -= size
            if not free:
                return shares
        self._widen(shares, free)
        return shares

    def _size(self, task: _Task, free: int, behind: int) -> int:
        """The best number of GPUs: the job's own time, and what that costs those who wait."""
        best, least = 0, math.inf
        for size, rate in task.rates.items():
            others = max(0, behind - (free - size)) + _EXPECTED
            cost = (1 + others * size / self._num_gpus) / rate
            if size <= free and cost < least:
                best, least = size, cost
        return best

    def _widen(self, shares: dict[_Task, int], free: int) -> None:
        """Gives GPUs that are left to the jobs that save most time for each."""
        while free:
            found = [
                (task.left * (1 / task.rates[size] - 1 / rate) / (more - size), -task.index, task)
                for task, size in shares.items()
                for more, rate in task.rates.items()
                if more == 2 * size and more - size <= free
            ]
            saved_s, _, task = max(found, default=(0.0, 0, None))
            if task is None or saved_s <= _WORTH_A_GPU * self._pause_s:
                return
            free -= shares[task]
            shares[task] *= 2

    def _apply(self, shares: dict[_Task, int], now_s: float) -> None:
        """Gives the shares, but leaves a job alone for which a change is hardly worth its pause."""
        held = sum(shares.values())
        for task in self._running:
            size = shares.get(task, 0)
            if not size or size == task.gpus:
                continue
            change_s = task.left * abs(1 / task.rates[size] - 1 / task.rates[task.gpus])
            if change_s < 2 * self._pause_s and held - size + task.gpus <= self._num_gpus:
                held += task.gpus - size
                shares[task] = task.gpus
        paused = [task for task in self._running if task not in shares]
        for task, size in shares.items():
            if not task.gpus:
                del self._waiting[bisect_left(self._waiting, (task.place, task))]
            if size != task.gpus:
                is_new = task.left == task.tokens
                task.ready_s = now_s if is_new else now_s + self._pause_s
                task.gpus = size
        self._running = list(shares)
        for task in paused:
            task.gpus = 0
            self._wait(task)
