"""Mean completion times that no policy beats, and what ideal resizing and pre-emption would bring.

Each bound answers an easier question, without placement, memory, slowdown bounds, quotas and
pauses: *alone*, every job has the whole cluster; *fluid*, any job can use all GPUs at full speed
and the least work left goes first; *mean busy times*, half of a job's fastest time must come after
its mean busy time. The greatest counts, if no group is faster than its best members allow
(`exceeded_by`). Malleable shortest remaining time, with jobs alone on powers of two GPUs, is an
estimate and no bound.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.tlora import EXPECTED
from tlora_megatron.scheduler.queue import Job
from tlora_megatron.sim.ledger import mean

_FULL_TOKENS = 16_384
"""Tokens of a step for each GPU that keep it at full speed, unless a job has more."""
_SHORTEST = 64
"""Sequences that are shorter than this take no less time for each token."""
_FULL_ON = (1, 2, 4, 8)
"""Numbers of GPUs on which a GPU's full speed is looked for: more have memory for less recompute,
and beyond a node they only lose time on links."""
_MIXED = 1.01
"""The model packs a drawn sample where lengths differ: a job may then be half a percent faster in a
group than alone, so that limits are one percent above its speed alone."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The least that a job takes of a cluster."""

    submit_s: float
    fastest_s: float
    """Time that it trains, alone on the GPUs on which it is fastest."""
    gpu_s: float
    """GPU seconds of its work in a group at full speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The greatest speeds that the jobs of a workload reach in any group."""

    fastest: Mapping[int, float]
    """By kind: tokens per second of a job."""
    full: Mapping[str, float]
    """By base model: tokens per second of a GPU."""

    def demand(self, job: Job) -> Demand:
        return Demand(
            submit_s=job.submit_s,
            fastest_s=job.tokens / self.fastest[job.kind],
            gpu_s=job.tokens / self.full[job.base],
        )


def limits_of(jobs: Iterable[Job], speeds: Speeds, num_gpus: int) -> Limits:
    """The greatest speeds on `num_gpus` GPUs, of the numbers that policies give to a job."""
    powers = [1 << power for power in range(num_gpus.bit_length())]
    sizes: dict[int, set[int]] = {}
    for job in jobs:
        sizes.setdefault(job.kind, set(powers)).update(
            job.num_gpus >> power for power in range(job.num_gpus.bit_length())
        )
    return Limits(
        fastest={kind: _fastest(speeds, kind, tried) for kind, tried in sizes.items()},
        full={
            base: _full(speeds, base, sizes) for base in dict.fromkeys(map(speeds.base_of, sizes))
        },
    )


def _fastest(speeds: Speeds, kind: int, sizes: Iterable[int]) -> float:
    found = (speeds.rates((kind,), size) for size in sizes)
    fastest = max(rates.total for rates in found if rates is not None)
    return fastest if len(speeds.load_of(kind).lengths.pairs) == 1 else _MIXED * fastest


def _full(speeds: Speeds, base: str, kinds: Iterable[int]) -> float:
    """Tokens per second of a GPU that trains a cheap adapter on short sequences."""
    loads = [speeds.load_of(kind) for kind in kinds if speeds.base_of(kind) == base]
    shortest = max(_SHORTEST, min(load.lengths.pairs[0][0] for load in loads))
    length = 1 << (shortest.bit_length() - 1)
    tokens = max(_FULL_TOKENS, *(load.batch_tokens for load in loads))
    cheap = JobLoad(
        name="full",
        rank=1,
        targets=min((load.targets for load in loads), key=len),
        batch_size=math.ceil(tokens / length),
        lengths=LengthHistogram.single(length),
        target_share=min(load.target_share for load in loads),
    )
    found = []
    for size in _FULL_ON:
        kind = speeds.kind(base, replace(cheap, batch_size=size * cheap.batch_size))
        rates = speeds.rates((kind,), size)
        found += [] if rates is None else [rates.total / size]
    return max(found)


def exceeded_by(limits: Limits, speeds: Speeds) -> list[str]:
    """Groups that train faster than the limits allow, in words; the bounds hold if none."""
    found = []
    for kinds, num_gpus, rates in speeds.answers():
        if not limits.fastest.keys() >= set(kinds):
            continue
        alone = all(rates.by_kind[k] <= limits.fastest[k] * (1 + _ROUNDING) for k in kinds)
        full = limits.full[speeds.base_of(kinds[0])] * num_gpus
        if not alone or rates.total > full * (1 + _ROUNDING):
            found.append(f"kinds {kinds} on {num_gpus} GPUs: {rates.total:.0f} tokens/s")
    return found


def least_mean_jct_s(jobs: Sequence[Job], speeds: Speeds, num_gpus: int) -> float:
    """The greatest of the three bounds on the mean time from submission to end."""
    limits = limits_of(jobs, speeds, num_gpus)
    demands = [limits.demand(job) for job in jobs]
    return max(alone_s(demands), fluid_s(demands, num_gpus), mean_busy_s(demands, num_gpus))


def alone_s(demands: Sequence[Demand]) -> float:
    """Mean of the jobs' own fastest times."""
    return mean([demand.fastest_s for demand in demands])


def fluid_s(demands: Sequence[Demand], num_gpus: int) -> float:
    """Mean completion time on one machine that serves the job with the least work left."""
    served = _serve(demands, num_gpus, lambda demand, left_s: left_s)
    return mean([s.end_s - d.submit_s for s, d in zip(served, demands, strict=True)])


def mean_busy_s(demands: Sequence[Demand], num_gpus: int) -> float:
    """Mean of busy times and half fastest times, on one machine that serves the smallest job.

    A job that ends at C cannot have done its work around a time later than C less half that time.
    """
    served = _serve(demands, num_gpus, lambda demand, left_s: demand.gpu_s)
    return mean(
        [s.mean_busy_s + d.fastest_s / 2 - d.submit_s for s, d in zip(served, demands, strict=True)]
    )


@dataclass(kw_only=True, slots=True)
class _Served:
    """When one machine served a job."""

    end_s: float = math.inf
    mean_busy_s: float = 0.0
    """The time at which it is served, averaged over its work."""


def _serve(
    demands: Sequence[Demand], num_gpus: int, first: Callable[[Demand, float], float]
) -> list[_Served]:
    """One machine of all GPUs serves the job for which `first` is least."""
    served = [_Served() for _ in demands]
    arrivals = sorted(range(len(demands)), key=lambda index: demands[index].submit_s)
    queue: list[tuple[float, int, float]] = []
    now_s, come = 0.0, 0
    while queue or come < len(arrivals):
        if not queue:
            now_s = max(now_s, demands[arrivals[come]].submit_s)
        while come < len(arrivals) and demands[arrivals[come]].submit_s <= now_s:
            whole_s = demands[arrivals[come]].gpu_s / num_gpus
            heapq.heappush(
                queue, (first(demands[arrivals[come]], whole_s), arrivals[come], whole_s)
            )
            come += 1
        until_s = demands[arrivals[come]].submit_s if come < len(arrivals) else math.inf
        _, index, left_s = heapq.heappop(queue)
        demand, entry = demands[index], served[index]
        run_s = min(left_s, until_s - now_s)
        share = run_s * num_gpus / demand.gpu_s
        entry.mean_busy_s += share * (now_s + run_s / 2)
        now_s = now_s + run_s if run_s == left_s else until_s
        if run_s == left_s:
            entry.end_s = now_s
        else:
            left_s -= run_s
            heapq.heappush(queue, (first(demand, left_s), index, left_s))
    return served


_PAUSE_S = 60.0
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


def malleable_mean_jct_s(jobs: Sequence[Job], speeds: Speeds, num_gpus: int) -> float:
    """Mean time from submission to end of jobs in order of submission."""
    return _Cluster(jobs, speeds, num_gpus).mean_jct_s()


class _Cluster:
    """The state between two events: who trains on how many GPUs, and who waits."""

    def __init__(self, jobs: Sequence[Job], speeds: Speeds, num_gpus: int) -> None:
        self._jobs = jobs
        self._speeds = speeds
        self._num_gpus = num_gpus
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
                job = self._jobs[come]
                rates = self._speeds.sizes(job.kind, self._num_gpus)
                task = _Task(
                    index=job.index,
                    submit_s=job.submit_s,
                    tokens=job.tokens,
                    left=job.tokens,
                    rates=rates,
                    fastest=max(rates.values()),
                )
                insort(self._waiting, (task.place, task))
                come += 1
            self._apply(self._shares(), now_s)
        return total_s / max(1, len(self._jobs))

    def _train(self, now_s: float, then_s: float) -> list[_Task]:
        """Trains until `then_s`, and returns the jobs that end then."""
        for task in self._running:
            ran_s = max(0.0, then_s - max(now_s, task.ready_s))
            task.left -= task.rates[task.gpus] * ran_s
        ended = [task for task in self._running if task.left <= _DONE * task.tokens]
        self._running = [task for task in self._running if task.left > _DONE * task.tokens]
        return ended

    def _shares(self) -> dict[_Task, int]:
        """GPUs for each job that is to train now."""
        shares: dict[_Task, int] = {}
        free, behind = self._num_gpus, len(self._running) + len(self._waiting)
        running = sorted((task.place, task) for task in self._running)
        for _, task in heapq.merge(running, self._waiting):
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
            others = max(0, behind - (free - size)) + EXPECTED
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
            if task is None or saved_s <= _WORTH_A_GPU * _PAUSE_S:
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
            if change_s < 2 * _PAUSE_S and held - size + task.gpus <= self._num_gpus:
                held += task.gpus - size
                shares[task] = task.gpus
        paused = [task for task in self._running if task not in shares]
        for task, size in shares.items():
            if not task.gpus:
                del self._waiting[bisect_left(self._waiting, (task.place, task))]
            if size != task.gpus:
                is_new = task.left == task.tokens
                task.ready_s = now_s if is_new else now_s + _PAUSE_S
                task.gpus = size
        self._running = list(shares)
        for task in paused:
            task.gpus = 0
            insort(self._waiting, (task.place, task))
