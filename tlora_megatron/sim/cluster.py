"""The simulated cluster: its description, its fleet, its failures, and its events in order."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from random import Random

from tlora_megatron.config.documents import read_file
from tlora_megatron.config.job import rule
from tlora_megatron.config.reader import must
from tlora_megatron.planner.hardware import HardwareProfile, Link, find_profile, shipped_profiles
from tlora_megatron.scheduler.fleet import Fleet, up_to_date
from tlora_megatron.scheduler.group_throughput import CalibratedSpeeds, Kinds, Speeds
from tlora_megatron.scheduler.policy import ClusterShape
from tlora_megatron.scheduler.queue import Group, Job, Member
from tlora_megatron.sim.ledger import Ledger


class Kind(IntEnum):
    """Kinds of events, in the order in which those of one moment are handled."""

    GROUP = 0
    NODE_UP = 1
    NODE_DOWN = 2
    CANCEL = 3
    ARRIVAL = 4
    REPORT = 5


_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRates:
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
    speed_error: float = rule(
        "share by which speeds may differ from the planner's; policies see them reported",
        default=0.0,
        ge=0,
        le=0.5,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    fails_after_tokens: Mapping[int, float] = field(default_factory=dict)
    """Tokens after which a job fails, by job index."""
    cancelled_s: Mapping[int, float] = field(default_factory=dict)
    """Time at which its owner cancels a job, by job index."""
    outages: tuple[tuple[float, float, int], ...] = ()
    """Outages as (begin, end, node), in order."""
    checkpoint_s: float = 600.0


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """How far the speeds of groups lie from the planner's: by mix, by GPUs, by job, and in time."""

    error: float
    """No speed is wrong by a greater share."""
    seed: int

    def factor(self, job: Job, kinds: Kinds, num_gpus: int, now_s: float) -> float:
        """True over predicted speed of a job in a group that is formed now."""
        of_mix, of_gpus = self._drawn(kinds, num_gpus), self._drawn(job.base, num_gpus)
        drift = math.sin(2 * math.pi * (now_s / _DRIFT_S + self._drawn("drift")))
        parts = 0.4 * of_mix + 0.2 * of_gpus + 0.2 * self._drawn(job.index) + 0.2 * drift
        return 1 + self.error * parts

    def alone_s(self, job: Job, speeds: Speeds, start_s: float) -> float:
        """Time that a job takes alone if it starts then."""
        rates = Speeds.rates(speeds, (job.kind,), job.num_gpus)  # whatever was measured
        assert rates is not None, "a job has memory on the GPUs that it asks for"
        return job.tokens / rates.total / self.factor(job, (job.kind,), job.num_gpus, start_s)

    def group(self, group: Group, speeds: Speeds) -> Group:
        """The group at its true speeds."""
        kinds, num = group.kinds, len(group.gpus)
        rates = Speeds.rates(speeds, kinds, num)
        assert rates is not None, "a group that is formed has memory"
        members = []
        for m in group.members:
            rate = rates.by_kind[m.job.kind] * self.factor(m.job, kinds, num, group.formed_s)
            members.append(replace(m, tokens_per_s=rate))
        return replace(group, members=tuple(members))

    def _drawn(self, *what: object) -> float:
        return Random(f"truth {what} {self.seed}").uniform(-1, 1)


_DRIFT_S = 5 * _HOUR_S
_REPORTS_S = (2.0, 4.0, 6.0, 8.0, 10.0)
"""When a group is measured after it has begun to train; then each time it is twice as old."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupSpec:
    admit_s: float = rule("pause in seconds when a job joins a running group", ge=0)
    replan_s: float = rule(
        "pause in seconds when a group gets other GPUs: plan, process groups, warm-up", ge=0
    )
    state_bytes_per_s: float = rule(
        "speed of saving and loading adapters and optimizer state", gt=0
    )
    weights_bytes_per_s: float = rule(
        "speed of loading the base model onto GPUs that lack it", gt=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaSpec:
    tenant: str = rule("name of the tenant in the trace", nonempty=True)
    gpus: int = rule("most GPUs that its running jobs may ask for together", ge=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """A cluster of equal nodes."""

    name: str = rule("name of the cluster in reports", nonempty=True)
    nodes: int = rule("number of nodes", ge=1)
    gpus_per_node: int = rule("GPUs per node", ge=1)
    nodes_per_rack: int = rule("nodes per rack", ge=1)
    profile: str = rule(
        "hardware profile: a name in this file's folder or configs/hardware, or a path",
        nonempty=True,
    )
    inter_node: Link = rule(
        "network between nodes, of one card where nics_per_node is given, else one GPU's share; "
        "replaces the profile's"
    )
    nics_per_node: int | None = rule(
        "network cards of a node, as in a profile; replaces the profile's", default=None, ge=1
    )
    regroup: RegroupSpec = rule("pauses of groups that change")
    quotas: tuple[QuotaSpec, ...] = rule("quotas of tenants", default=())

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(
            num_nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            nodes_per_rack=self.nodes_per_rack,
        )


def load_cluster(path: str | Path) -> tuple[ClusterSpec, HardwareProfile]:
    """Reads a cluster and the profile of its GPUs, or raises a `ConfigError`."""
    path = Path(path)
    spec = read_file(ClusterSpec, path, "cluster", "--cluster")
    profile = find_profile(spec.profile, (path.parent, shipped_profiles()), "cluster.profile")
    if spec.gpus_per_node > profile.gpus_per_node:
        raise must(
            "cluster.gpus_per_node",
            f"be at most {profile.gpus_per_node}, what {profile.name} connects",
            spec.gpus_per_node,
        )
    profile = profile.of_nodes(spec.gpus_per_node)
    return spec, replace(profile, inter_node=spec.inter_node, nics_per_node=spec.nics_per_node)


class SimulatedFleet(Fleet):
    """A fleet whose groups end by their true speeds, or fail where a fault was drawn.

    The groups that policies see have the speeds that are believed.
    """

    def __init__(
        self,
        *,
        shape: ClusterShape,
        speeds: Speeds,
        faults: Faults,
        quotas: Mapping[str, int],
        ledger: Ledger,
        truth: Truth | None = None,
    ) -> None:
        """Begins with all GPUs free; `ledger` is shared with the simulator."""
        super().__init__(shape=shape, speeds=speeds, quotas=quotas)
        self._faults = faults
        self._ledger = ledger
        self._truth = truth
        self.true: dict[int, Group] = {}
        """The running groups at their true speeds, since they were formed."""
        self.events: list[tuple[float, int, int, int]] = []
        """A heap, totally ordered by (time, kind, sequence)."""
        self._pushed = itertools.count()

    def push(self, time_s: float, kind: Kind, what: int) -> None:
        """Adds an event; `what` is the number of a job, a group or a node."""
        heapq.heappush(self.events, (time_s, int(kind), next(self._pushed), what))

    def stop_s(self, group: Group, member: Member) -> float:
        """When a member ends or fails if nothing changes."""
        fails_after = self._faults.fails_after_tokens.get(member.job.index)
        if fails_after is None:
            return group.end_s(member)
        left = member.tokens_left - (member.job.tokens - fails_after)
        return group.ready_s + max(0.0, left) / member.tokens_per_s

    def open(self, group: Group) -> None:
        """Puts a group on free GPUs, and its first end among the events."""
        super().open(group)
        true = self.true[group.number] = (
            self._truth.group(group, self._speeds) if self._truth else group
        )
        stop_s = min([self.stop_s(true, member) for member in true.members])
        self.push(stop_s, Kind.GROUP, group.number)
        if self._truth:
            self.push(group.ready_s + _REPORTS_S[0], Kind.REPORT, group.number)

    def close(self, group: Group, now_s: float) -> None:
        """Takes a group off its GPUs and enters what it trained."""
        self._ledger.close(self.true.pop(group.number), now_s)
        super().close(group, now_s)

    def refresh(self, group: Group, now_s: float) -> Group:
        """Brings what is believed of a running group up to date with what it has trained."""
        if self._truth is None or now_s < group.ready_s:
            return group
        true = self.true[group.number]
        left = {m.job.index: true.tokens_left(m, now_s) for m in true.members}
        jobs = {m.job.index: (self.priced(m.job), left[m.job.index]) for m in group.members}
        rates = self._speeds.rates(group.kinds, len(group.gpus))
        known = up_to_date(group, jobs, {} if rates is None else rates.by_kind, now_s)
        self.cluster.groups[group.number] = known
        return known

    def priced(self, job: Job) -> Job:
        """A job with the time that it would take alone as it is believed now."""
        rates = self._speeds.rates((job.kind,), job.num_gpus)
        rate = job.isolated_tokens_per_s if rates is None else rates.total
        return replace(job, isolated_s=job.tokens / rate, isolated_tokens_per_s=rate)

    def report(self, number: int, now_s: float) -> bool:
        """Measures a group, if it is still there; True if speeds are believed to be others now."""
        true = self.true.get(number)
        if true is None:
            return False
        trained_s = now_s - true.ready_s
        again_s = next((s for s in _REPORTS_S if s > trained_s + 1e-6), 2 * trained_s)
        self.push(true.ready_s + again_s, Kind.REPORT, number)
        tokens = sum(self._speeds.load_of(kind).batch_tokens for kind in true.kinds)
        rounds = math.ceil(min(trained_s, _REPORTS_S[0]) * true.tokens_per_s / tokens)
        assert isinstance(self._speeds, CalibratedSpeeds), "only a belief is corrected"
        args = (true.kinds, len(true.gpus), true.tokens_per_s, rounds)
        return self._speeds.measured(*args) is not None
