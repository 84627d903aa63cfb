"""Mean completion times that no policy beats.

Each bound answers an easier question, without placement, memory, slowdown bounds, quotas and
pauses: *alone*, every job has the whole cluster; *fluid*, any job can use all GPUs at full speed
and the least work left goes first; *mean busy times*, half of a job's fastest time must come after
its mean busy time. The greatest counts, if no group is faster than its best members allow (which
scripts/bench/simulate checks).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.group_throughput import Speeds
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
    ends_s, _ = _serve(demands, num_gpus, lambda demand, left_s: left_s)
    return mean([end_s - d.submit_s for end_s, d in zip(ends_s, demands, strict=True)])


def mean_busy_s(demands: Sequence[Demand], num_gpus: int) -> float:
    """Mean of busy times and half fastest times, on one machine that serves the smallest job.

    A job that ends at C cannot have done its work around a time later than C less half that time.
    """
    _, busy_s = _serve(demands, num_gpus, lambda demand, left_s: demand.gpu_s)
    return mean(
        [at_s + d.fastest_s / 2 - d.submit_s for at_s, d in zip(busy_s, demands, strict=True)]
    )


def _serve(
    demands: Sequence[Demand], num_gpus: int, first: Callable[[Demand, float], float]
) -> tuple[list[float], list[float]]:
    """One machine of all GPUs serves the job for which `first` is least.

    Returns jobs' ends, and the times at which each is served, averaged over its work.
    """
    ends_s, busy_s = [math.inf] * len(demands), [0.0] * len(demands)
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
        demand = demands[index]
        run_s = min(left_s, until_s - now_s)
        share = run_s * num_gpus / demand.gpu_s
        busy_s[index] += share * (now_s + run_s / 2)
        now_s = now_s + run_s if run_s == left_s else until_s
        if run_s == left_s:
            ends_s[index] = now_s
        else:
            left_s -= run_s
            heapq.heappush(queue, (first(demand, left_s), index, left_s))
    return ends_s, busy_s
