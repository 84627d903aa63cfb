"""Discrete events in a total order: arrivals, ends, cancellations, nodes that fail and come back.

All events of one moment are taken in first, then the policy decides once. Between events every
group trains at the speeds the model gave for it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterShape, ClusterState, FreeGpus
from tlora_megatron.scheduler.formation import (
    Parts,
    carried_on,
    ends_in_bounds,
    formed,
    speeds_in_bounds,
)
from tlora_megatron.scheduler.group_throughput import GroupRates, Speeds
from tlora_megatron.scheduler.jobs import Group, Job, Member, Waiting
from tlora_megatron.scheduler.policy import Decision, Policy, RegroupCost
from tlora_megatron.scheduler.queue import WaitingQueue
from tlora_megatron.sim.events import Clock, Events, Kind
from tlora_megatron.sim.faults import Faults
from tlora_megatron.sim.ledger import InvariantError, Ledger, require

_SAME_MOMENT_S = 1e-7
"""Members that end so close together end in one event."""
_PROGRESS_EVERY = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A run's books and what deciding cost."""

    ledger: Ledger
    num_decisions: int
    decide_s: float
    """Wall time in `decide`, all calls."""
    longest_decide_s: float
    wall_s: float


class Simulator:
    """One run of one policy."""

    def __init__(
        self,
        *,
        jobs: list[Job],
        shape: ClusterShape,
        policy: Policy,
        speeds: Speeds,
        cost: RegroupCost,
        faults: Faults | None = None,
        quotas: Mapping[str, int] | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Prepares a run.

        Args:
            jobs: in order of submission; `Job.index` is the place in the list.
            shape: of the cluster.
            policy: decides.
            speeds: of groups; the same that the policy asks.
            cost: of changes to groups.
            faults: what goes wrong; None = nothing.
            quotas: GPUs by tenant.
            on_progress: told the share of the jobs that have ended, now and then.
        """
        self._jobs = jobs
        self._policy = policy
        self._speeds = speeds
        self._cost = cost
        self._faults = faults or Faults.none()
        self._on_progress = on_progress
        self._queue = WaitingQueue()
        self._state = ClusterState(shape=shape, free=FreeGpus.all_of(shape), quotas=quotas or {})
        self._down: set[int] = set()
        self._ledger = Ledger(policy.keeps_bounds)
        self._where: dict[int, int] = {}
        self._events = Events()
        self._num_groups = 0

    def run(self) -> Outcome:
        """Runs until every job has ended, and checks the books.

        Raises:
            InvariantError: if they do not balance or a decision breaks a rule.
        """
        begin = time.perf_counter()
        clock = Clock()
        self._push_known_events()
        heap = self._events.heap
        steps = 0
        while heap:
            now_s = heap[0][0]
            self._ledger.advance(now_s, self._busy_gpus())
            stale = True
            while heap and heap[0][0] == now_s:
                _, kind, _, what = heapq.heappop(heap)
                stale &= not self._HANDLERS[kind](self, what, now_s)
            if len(self._ledger.records) == len(self._jobs):
                break
            if not stale:
                self._decide(now_s, clock)
            steps += 1
            if self._on_progress and steps % _PROGRESS_EVERY == 0:
                self._on_progress(len(self._ledger.records) / len(self._jobs))
        self._ledger.balance(self._jobs)
        return Outcome(
            ledger=self._ledger,
            num_decisions=clock.count,
            decide_s=clock.total_s,
            longest_decide_s=clock.longest_s,
            wall_s=time.perf_counter() - begin,
        )

    def _push_known_events(self) -> None:
        for job in self._jobs:
            self._events.push(job.submit_s, Kind.ARRIVAL, job.index)
        for index, when_s in sorted(self._faults.cancelled_s.items()):
            self._events.push(when_s, Kind.CANCEL, index)
        for begin_s, end_s, node in self._faults.outages:
            self._events.push(begin_s, Kind.NODE_DOWN, node)
            self._events.push(end_s, Kind.NODE_UP, node)

    def _busy_gpus(self) -> int:
        down = len(self._down) * self._state.shape.gpus_per_node
        return self._state.shape.num_gpus - down - self._state.free.num

    # Events; each returns whether anything changed.

    def _arrive(self, index: int, now_s: float) -> bool:
        job = self._jobs[index]
        if not self._can_ever_run(job):
            self._ledger.drop(job, "rejected", now_s)
            return False
        self._queue.add(Waiting(job=job, tokens_left=job.tokens, queued_s=now_s))
        return True

    def _can_ever_run(self, job: Job) -> bool:
        quota = self._state.quotas.get(job.tenant, job.num_gpus)
        return job.num_gpus <= min(quota, self._state.shape.num_gpus)

    def _group_event(self, number: int, now_s: float) -> bool:
        group = self._state.groups.get(number)
        if group is None:
            return False
        stopping = [m for m in group.members if self._stop_s(group, m) <= now_s + _SAME_MOMENT_S]
        self._close(group, now_s)
        for member in stopping:
            self._leave(member.job)
            if member.job.index in self._faults.fails_after_tokens:
                self._ledger.drop(member.job, "failed", now_s)
            else:
                self._ledger.finish(member, now_s)
        self._continue(group, stopping, now_s)
        return True

    def _cancel(self, index: int, now_s: float) -> bool:
        job = self._jobs[index]
        if index in self._queue:
            self._queue.remove(index)
        elif index in self._where:
            group = self._state.groups[self._where[index]]
            member = next(m for m in group.members if m.job.index == index)
            self._close(group, now_s)
            self._leave(job)
            self._continue(group, [member], now_s)
        else:
            return False
        self._ledger.drop(job, "cancelled", now_s)
        return True

    def _node_down(self, node: int, now_s: float) -> bool:
        shape = self._state.shape
        gone = set(shape.gpus_of(node))
        for group in [g for g in self._state.groups.values() if not gone.isdisjoint(g.gpus)]:
            self._close(group, now_s)
            for member in group.members:
                self._leave(member.job)
                self._requeue(group, member, now_s)
        self._down.add(node)
        self._state.free.take(shape.gpus_of(node))
        return True

    def _node_up(self, node: int, now_s: float) -> bool:
        self._down.remove(node)
        self._state.free.give(self._state.shape.gpus_of(node))
        self._state.freed = True
        return True

    _HANDLERS: Mapping[int, Callable[[Simulator, int, float], bool]] = {
        Kind.GROUP: _group_event,
        Kind.NODE_UP: _node_up,
        Kind.NODE_DOWN: _node_down,
        Kind.CANCEL: _cancel,
        Kind.ARRIVAL: _arrive,
    }

    # Groups

    def _stop_s(self, group: Group, member: Member) -> float:
        """When a member ends or fails if nothing changes."""
        fails_after = self._faults.fails_after_tokens.get(member.job.index)
        if fails_after is None:
            return group.end_s(member)
        left = member.tokens_left - (member.job.tokens - fails_after)
        return group.ready_s + max(0.0, left) / member.tokens_per_s

    def _close(self, group: Group, now_s: float) -> None:
        """Takes a group off its GPUs."""
        self._ledger.close(group, now_s)
        del self._state.groups[group.number]
        self._state.changed.discard(group.number)
        self._state.free.give(group.gpus)
        self._state.freed = True

    def _open(self, group: Group) -> None:
        """Puts a group on free GPUs."""
        self._state.free.take(group.gpus)
        self._state.groups[group.number] = group
        for member in group.members:
            self._where[member.job.index] = group.number
        stop_s = min([self._stop_s(group, member) for member in group.members])
        self._events.push(stop_s, Kind.GROUP, group.number)

    def _continue(self, group: Group, without: list[Member], now_s: float) -> None:
        """What is left of a group trains on."""
        gone = {member.job.index for member in without}
        parts = Parts(running=tuple((group, m) for m in group.members if m.job.index not in gone))
        if not len(parts):
            return
        rates = self._rates(parts, len(group.gpus))
        rest = carried_on(group, parts, rates=rates, now_s=now_s, number=self._next_number())
        self._open(rest)
        self._state.changed.add(rest.number)

    def _requeue(self, group: Group, member: Member, now_s: float) -> None:
        """Back to the last checkpoint, and into the queue."""
        trained_s = max(0.0, now_s - group.ready_s)
        lost = member.tokens_per_s * (trained_s % self._faults.checkpoint_s)
        left = group.tokens_left(member, now_s)
        lost = min(lost, member.tokens_left - left)
        self._ledger.lose(member.job.index, lost)
        self._queue.add(Waiting(job=member.job, tokens_left=left + lost, queued_s=now_s))

    def _charge(self, job: Job) -> None:
        held = self._state.tenant_gpus.get(job.tenant, 0) + job.num_gpus
        quota = self._state.quotas.get(job.tenant, held)
        require(held <= quota, f"tenant {job.tenant!r} must hold at most {quota} GPUs, got {held}")
        self._state.tenant_gpus[job.tenant] = held

    def _leave(self, job: Job) -> None:
        del self._where[job.index]
        self._state.tenant_gpus[job.tenant] -= job.num_gpus

    def _rates(self, parts: Parts, num_gpus: int) -> GroupRates:
        rates = self._speeds.rates(parts.kinds, num_gpus)
        if rates is None:
            names = ", ".join(job.name for job in parts.jobs)
            raise InvariantError(f"memory of {num_gpus} GPUs must hold jobs {names}")
        return rates

    def _next_number(self) -> int:
        self._num_groups += 1
        return self._num_groups

    # Decisions

    def _decide(self, now_s: float, clock: Clock) -> None:
        begin = time.perf_counter()
        decisions = self._policy.decide(now_s, self._queue, self._state)
        clock.add(time.perf_counter() - begin)
        self._queue.arrived.clear()
        self._state.changed.clear()
        self._state.freed = False
        if decisions:
            self._carry_out(decisions, now_s)

    def _carry_out(self, decisions: list[Decision], now_s: float) -> None:
        loose: dict[int, tuple[Group, Member]] = {}
        for number in [number for decision in decisions for number in decision.dissolve]:
            group = self._state.groups[number]
            self._close(group, now_s)
            loose.update((member.job.index, (group, member)) for member in group.members)
        for decision in decisions:
            self._form(decision, loose, now_s)
        require(not loose, f"a dissolved group's members must go on, got {sorted(loose)} left")
        self._state.freed = False

    def _form(
        self, decision: Decision, loose: dict[int, tuple[Group, Member]], now_s: float
    ) -> None:
        joining = [index for index in decision.members if index not in loose]
        for index in joining:
            self._charge(self._jobs[index])
        parts = Parts(
            running=tuple(loose.pop(index) for index in decision.members if index in loose),
            joining=tuple(self._queue.remove(index) for index in joining),
        )
        rates = self._rates(parts, len(decision.gpus))
        require(len({job.base for job in parts.jobs}) == 1, "members must share a base model")
        group = formed(
            parts,
            gpus=decision.gpus,
            rates=rates,
            now_s=now_s,
            cost=self._cost,
            number=self._next_number(),
        )
        if self._policy.keeps_bounds:
            within = speeds_in_bounds(parts.jobs, rates) and ends_in_bounds(group)
            require(within, f"slowdown bounds must hold for jobs {decision.members}")
        self._open(group)
