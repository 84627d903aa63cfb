"""Replays one trace on one cluster under several policies, with equal jobs and faults.

A `Simulator` runs one policy by discrete events: arrivals, ends, cancellations, failing and
repaired nodes. They are totally ordered. All events of one moment are handled first, then the
policy decides once. Between events every group trains at the speeds that the model gives for it.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from tlora_megatron.config.reader import must
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.search import GroupModel
from tlora_megatron.scheduler.group_throughput import CalibratedSpeeds, Speeds
from tlora_megatron.scheduler.policy import ClusterShape, Policy, RegroupCost, Rules
from tlora_megatron.scheduler.queue import Group, Job, Member, Waiting, WaitingQueue
from tlora_megatron.scheduler.registry import make_policy
from tlora_megatron.sim.bounds import least_mean_jct_s
from tlora_megatron.sim.cluster import (
    ClusterSpec,
    FaultRates,
    Faults,
    Kind,
    SimulatedFleet,
    Truth,
    draw_faults,
)
from tlora_megatron.sim.ledger import Ledger, Summary, summarise
from tlora_megatron.sim.trace import Trace, TraceShape, shaped
from tlora_megatron.sim.workload import JobMix, flops_per_token, make_jobs, weights_bytes

_SAME_MOMENT_S = 1e-7
"""Members of a group that end within this time of each other end in one event."""
_PROGRESS_EVERY = 500
_LATE = -1
"""In the place of a group's number: a paused job may be late now, though nothing else happens."""


class Simulator:
    def __init__(
        self,
        *,
        jobs: list[Job],
        shape: ClusterShape,
        policy: Policy,
        speeds: Speeds,
        cost: RegroupCost,
        faults: Faults,
        quotas: Mapping[str, int],
        truth: Truth | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Prepares a run.

        Args:
            jobs: in order of submission; `Job.index` is the place in the list.
            speeds: the same object that the policy asks.
            truth: how far they are wrong; None: they are right.
            on_progress: called from time to time with the share of the jobs that have ended.
        """
        self._jobs = jobs
        self._policy = policy
        self._speeds = speeds
        self._cost = cost
        self._faults = faults
        self._on_progress = on_progress
        self.longest_decide_s = 0.0
        """CPU time of the longest call of `decide`."""
        self._queue = WaitingQueue()
        self._truth = truth
        self._ledger = Ledger(policy.keeps_bounds and truth is None)
        self._fleet = SimulatedFleet(
            shape=shape,
            speeds=speeds,
            faults=faults,
            quotas=quotas,
            ledger=self._ledger,
            truth=truth,
        )

    def run(self) -> Ledger:
        """Runs until every job has ended; an `InvariantError` if the ledger does not balance."""
        for job in self._jobs:
            self._fleet.push(job.submit_s, Kind.ARRIVAL, job.index)
        for index, when_s in sorted(self._faults.cancelled_s.items()):
            self._fleet.push(when_s, Kind.CANCEL, index)
        for begin_s, end_s, node in self._faults.outages:
            self._fleet.push(begin_s, Kind.NODE_DOWN, node)
            self._fleet.push(end_s, Kind.NODE_UP, node)
        heap = self._fleet.events
        steps = 0
        while heap:
            now_s = heap[0][0]
            self._ledger.advance(now_s, self._fleet.busy_gpus)
            stale = True
            while heap and heap[0][0] == now_s:
                _, kind, _, what = heapq.heappop(heap)
                stale &= not self._HANDLERS[kind](self, what, now_s)
            if len(self._ledger.records) == len(self._jobs):
                break
            if not stale:
                self._decide(now_s)
            steps += 1
            if self._on_progress and steps % _PROGRESS_EVERY == 0:
                self._on_progress(len(self._ledger.records) / len(self._jobs))
        self._ledger.balance(self._jobs)
        return self._ledger

    # Event handlers; each returns True if anything changed.

    def _arrive(self, index: int, now_s: float) -> bool:
        job = self._jobs[index]
        if not self._fleet.can_ever_run(job):
            self._ledger.drop(job, "rejected", now_s)
            return False
        self._speeds.prepare(job.kind, self._fleet.cluster.shape.num_gpus)
        self._enqueue(Waiting(job=job, tokens_left=job.tokens, queued_s=now_s))
        return True

    def _group_event(self, number: int, now_s: float) -> bool:
        group = self._fleet.cluster.groups.get(number)
        if group is None:
            return False
        true = self._fleet.true[number]
        stopping = [
            m for m in true.members if self._fleet.stop_s(true, m) <= now_s + _SAME_MOMENT_S
        ]
        group = self._fleet.refresh(group, now_s)
        self._fleet.close(group, now_s)
        for member in stopping:
            self._fleet.leave(member.job)
            if member.job.index in self._faults.fails_after_tokens:
                self._ledger.drop(member.job, "failed", now_s)
            else:
                self._ledger.finish(member, now_s, self._alone_s(member))
        self._fleet.carry_on(group, stopping, now_s)
        return True

    def _cancel(self, index: int, now_s: float) -> bool:
        job = self._jobs[index]
        if index in self._queue:
            if self._queue.remove(index).pause is not None:
                self._fleet.discharge(job)
            self._fleet.changes.arrived.discard(index)
        elif (group := self._fleet.group_of(index)) is not None:
            group = self._fleet.refresh(group, now_s)
            member = next(m for m in group.members if m.job.index == index)
            self._fleet.close(group, now_s)
            self._fleet.leave(job)
            self._fleet.carry_on(group, [member], now_s)
        else:
            return False
        self._ledger.drop(job, "cancelled", now_s)
        return True

    def _node_down(self, node: int, now_s: float) -> bool:
        state = self._fleet.cluster
        gone = set(state.shape.gpus_of(node))
        for group in [g for g in state.groups.values() if not gone.isdisjoint(g.gpus)]:
            group = self._fleet.true[group.number]
            self._fleet.close(group, now_s)
            for member in group.members:
                self._fleet.leave(member.job)
                self._requeue(group, member, now_s)
        for waiting in self._queue.paused():
            if waiting.pause is not None and not gone.isdisjoint(waiting.pause.gpus):
                self._queue.remove(waiting.job.index)
                self._fleet.discharge(waiting.job)
                self._enqueue(replace(waiting, queued_s=now_s, pause=None))
        self._fleet.node_down(node)
        return True

    def _requeue(self, group: Group, member: Member, now_s: float) -> None:
        """Puts a job back into the queue at its last checkpoint."""
        trained_s = max(0.0, now_s - group.ready_s)
        lost = member.tokens_per_s * (trained_s % self._faults.checkpoint_s)
        left = group.tokens_left(member, now_s)
        lost = min(lost, member.tokens_left - left)
        self._ledger.lose(member.job.index, lost)
        self._enqueue(Waiting(job=member.job, tokens_left=left + lost, queued_s=now_s))

    def _enqueue(self, waiting: Waiting) -> None:
        self._queue.add(waiting)
        self._fleet.changes.arrived.add(waiting.job.index)

    def _node_up(self, node: int, now_s: float) -> bool:
        self._fleet.node_up(node)
        return True

    def _report(self, number: int, now_s: float) -> bool:
        if number == _LATE:
            return True
        if not self._fleet.report(number, now_s):
            return False
        for job in [job for job in self._jobs if job.index in self._queue]:
            waiting = self._queue.remove(job.index)
            self._queue.add(replace(waiting, job=self._fleet.priced(waiting.job)))
        return True

    def _alone_s(self, member: Member) -> float:
        job, truth = self._jobs[member.job.index], self._truth
        return truth.alone_s(job, self._speeds, member.started_s) if truth else job.isolated_s

    _HANDLERS: Mapping[int, Callable[[Simulator, int, float], bool]] = {
        Kind.GROUP: _group_event,
        Kind.NODE_UP: _node_up,
        Kind.NODE_DOWN: _node_down,
        Kind.CANCEL: _cancel,
        Kind.ARRIVAL: _arrive,
        Kind.REPORT: _report,
    }

    # Decisions

    def _decide(self, now_s: float) -> None:
        if self._truth:
            for group in list(self._fleet.cluster.groups.values()):
                self._fleet.refresh(group, now_s)
        begin = time.process_time()
        self._fleet.end_late_pauses(self._queue, now_s)
        changes = self._fleet.changes.take()
        decisions = self._policy.decide(now_s, self._queue, self._fleet.cluster, changes)
        self.longest_decide_s = max(self.longest_decide_s, time.process_time() - begin)
        if decisions:
            self._fleet.carry_out(
                decisions,
                self._queue,
                now_s=now_s,
                cost=self._cost,
                keeps_bounds=self._policy.keeps_bounds and self._truth is None,
            )
        back_by_s = self._queue.needed_s()
        if self._truth and now_s <= back_by_s < math.inf:
            self._fleet.push(back_by_s + 1.0, Kind.REPORT, _LATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    shape: TraceShape = field(default_factory=TraceShape)
    seed: int = 0
    max_slowdown: float | None = None
    """Bound on every job's slowdown; None: the mix's bound."""
    faults: FaultRates = field(default_factory=FaultRates)
    rules: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the policies' `Rules` that are not as usual."""
    gpu_hour_price: float | None = None
    """Of a GPU that a group holds."""
    gpu_watts: float | None = None
    """Power that such a GPU draws, whatever it computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRun:
    policy: str
    summary: Summary
    ledger: Ledger = field(repr=False)
    longest_decide_s: float
    """CPU time of the longest decision."""
    wall_s: float


class Study:
    """A trace prepared once (shaped, jobs and faults drawn); `run` replays it under a policy."""

    def __init__(
        self,
        *,
        trace: Trace,
        cluster: ClusterSpec,
        profile: HardwareProfile,
        mix: JobMix,
        specs: dict[str, ModelSpec],
        options: Options,
    ) -> None:
        """Shapes the trace, and draws jobs and faults.

        Raises:
            ValueError: if no job is left, or a job does not fit into memory.
        """
        self.cluster = cluster
        self.options = options
        self.mix = mix
        self.profile = profile
        shape = cluster.shape
        self.trace = shaped(trace, options.shape, shape.num_gpus, options.seed)
        self._models = {name: GroupModel(spec, profile) for name, spec in specs.items()}
        self.speeds = Speeds(self._models)
        bound = options.max_slowdown
        self.jobs = make_jobs(self.trace, mix, specs, self.speeds, options.seed, bound)
        self._faults = draw_faults(options.faults, self.jobs, shape.num_nodes, options.seed)
        self._flops = {name: flops_per_token(spec) for name, spec in specs.items()}
        weights = {name: weights_bytes(spec) for name, spec in specs.items()}
        cost = RegroupCost(**asdict(cluster.regroup), weights_bytes=weights)
        self._rules = Rules(**{"cost": cost, **options.rules})

    @property
    def offered_load(self) -> float:
        """GPU time that the jobs take alone, over the cluster's from first to last submission."""
        jobs = self.jobs
        span = jobs[-1].submit_s - jobs[0].submit_s
        asked = sum(job.num_gpus * job.isolated_s for job in jobs)
        return asked / (span * self.cluster.shape.num_gpus) if span else float("inf")

    @property
    def load(self) -> float:
        """The load that was asked for; the offered load of a trace that is replayed as recorded."""
        asked = self.options.shape.load
        return self.offered_load if asked is None else asked

    @cached_property
    def least_jct_s(self) -> float | None:
        """A mean completion time that no policy beats; None with faults."""
        if self.options.faults != FaultRates():
            return None
        num_gpus = self.cluster.shape.num_gpus
        quotas = {quota.tenant: quota.gpus for quota in self.cluster.quotas}
        jobs = [j for j in self.jobs if j.num_gpus <= quotas.get(j.tenant, num_gpus)]
        return least_mean_jct_s(jobs, self.speeds, num_gpus)

    def run(self, policy: str, on_progress: Callable[[float], None] | None = None) -> PolicyRun:
        """Replays the trace under a policy; raises `ValueError` or `InvariantError`."""
        error, speeds = self.options.faults.speed_error, self.speeds
        if error:
            speeds = CalibratedSpeeds.beside(speeds)
        simulator = Simulator(
            jobs=self.jobs,
            shape=self.cluster.shape,
            policy=make_policy(policy, speeds, self._rules),
            speeds=speeds,
            truth=Truth(error=error, seed=self.options.seed) if error else None,
            cost=self._rules.cost,
            faults=self._faults,
            quotas={quota.tenant: quota.gpus for quota in self.cluster.quotas},
            on_progress=on_progress,
        )
        begin = time.perf_counter()
        ledger = simulator.run()
        wall_s = time.perf_counter() - begin
        summary = summarise(
            ledger.records,
            ledger.segments,
            self._flops,
            num_gpus=self.cluster.shape.num_gpus,
            flops_per_s=max(point.forward_flops_per_s for point in self.profile.gemms),
        )
        return PolicyRun(
            policy=policy,
            summary=summary,
            ledger=ledger,
            longest_decide_s=simulator.longest_decide_s,
            wall_s=wall_s,
        )


def check_policies(names: Sequence[str]) -> None:
    """Refuses unknown and repeated names of policies."""
    if not names or len(set(names)) < len(names):
        raise must("--policy", "name policies once each", ",".join(names))
    for name in names:
        make_policy(name, Speeds({}), Rules())
