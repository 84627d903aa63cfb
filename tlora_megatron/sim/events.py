"""The events of a run in their order, and failures drawn before it, the same for every policy."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

from tlora_megatron.config.job import rule
from tlora_megatron.scheduler.jobs import Job


class Kind(IntEnum):
    """Kinds of events, in the order in which those of one moment are handled."""

    GROUP = 0
    NODE_UP = 1
    NODE_DOWN = 2
    CANCEL = 3
    ARRIVAL = 4


@dataclass(kw_only=True, slots=True)
class Clock:
    """Measures the CPU time that decisions take."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)


@dataclass(kw_only=True, slots=True)
class Events:
    """A heap of events, totally ordered by (time, kind, sequence)."""

    heap: list[tuple[float, int, int, int]] = field(default_factory=list)
    pushed: int = 0

    def push(self, time_s: float, kind: Kind, what: int) -> None:
        heapq.heappush(self.heap, (time_s, int(kind), self.pushed, what))
        self.pushed += 1


_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRates:
    """Rates of failures and cancellations."""

    job_failures: float = rule(
        "share of jobs that fail, at a random point of their work", default=0.0, ge=0, le=1
    )
    cancellations: float = rule(
        "share of jobs that are cancelled, uniformly within three times their time alone after "
        "submission, if they are still there",
        default=0.0,
        ge=0,
        le=1,
    )
    node_mtbf_hours: float = rule(
        "mean time between failures of one node, exponential; 0: none", default=0.0, ge=0
    )
    node_repair_hours: float = rule("time until a failed node is back", default=2.0, gt=0)
    checkpoint_s: float = rule(
        "time between checkpoints; a node's failure loses the work since the last one",
        default=600.0,
        gt=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """The failures and cancellations of a run."""

    fails_after_tokens: dict[int, float]
    """Tokens after which a job fails, by job index."""
    cancelled_s: dict[int, float]
    """Time at which its owner cancels a job, by job index."""
    outages: tuple[tuple[float, float, int], ...] = ()
    """Outages as (begin, end, node), in order."""
    checkpoint_s: float = 600.0

    @classmethod
    def none(cls) -> Faults:
        """A run without failures and cancellations."""
        return cls(fails_after_tokens={}, cancelled_s={})


def draw_faults(rates: FaultRates, jobs: list[Job], num_nodes: int, seed: int) -> Faults:
    """Draws faults from `seed`; nodes fail until twice the time from first to last submission."""
    fails, cancelled = {}, {}
    rng = Random(f"jobs {seed}")
    for job in jobs:
        chance, place, when = rng.random(), rng.random(), rng.random()
        if chance < rates.job_failures:
            fails[job.index] = place * job.tokens
        elif chance < rates.job_failures + rates.cancellations:
            cancelled[job.index] = job.submit_s + 3 * when * job.isolated_s
    return Faults(
        fails_after_tokens=fails,
        cancelled_s=cancelled,
        outages=_draw_outages(rates, jobs, num_nodes, seed),
        checkpoint_s=rates.checkpoint_s,
    )


def _draw_outages(
    rates: FaultRates, jobs: list[Job], num_nodes: int, seed: int
) -> tuple[tuple[float, float, int], ...]:
    if not rates.node_mtbf_hours or not jobs:
        return ()
    horizon_s = 2 * max(job.submit_s for job in jobs) + 24 * _HOUR_S
    outages = []
    for node in range(num_nodes):
        rng = Random(f"node {node} {seed}")
        now_s = rng.expovariate(1 / (rates.node_mtbf_hours * _HOUR_S))
        while now_s < horizon_s:
            end_s = now_s + rates.node_repair_hours * _HOUR_S
            outages.append((now_s, end_s, node))
            now_s = end_s + rng.expovariate(1 / (rates.node_mtbf_hours * _HOUR_S))
    return tuple(sorted(outages))
