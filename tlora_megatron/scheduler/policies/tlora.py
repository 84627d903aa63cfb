"""`tlora`: residual-capacity-aware hierarchical incremental grouping.

A reconstruction of tLoRA's Adapter Scheduler (arXiv 2602.07263) from public descriptions. Jobs are
queued by urgency, then by residual capacity. Each job searches for the running group that it fits
most tightly: a binary search over groups sorted by residual capacity, first groups within one
node, then within one rack, then across the cluster. A merge must raise the joint throughput and
keep every member within its slowdown bound; the merged group becomes a candidate again. When
nothing waits, fused jobs move to free GPUs if the parts train faster than the whole. While a job is
overdue, groups give back the GPUs that no member asks for.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.admission import start_alone
from tlora_megatron.scheduler.policies.held_gpus import soonest_nodes
from tlora_megatron.scheduler.policies.separation import separate, shrink
from tlora_megatron.scheduler.policies.tentative_groups import Hosts, Proposal, TentativeGroups
from tlora_megatron.scheduler.policy import Changes, Decision, Rules
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue

_DELAY_WEIGHT, _OTHERS_WEIGHT = 2.0, 3.0
"""A host that takes one joining job will take more, and a queue that is there will last: both count
beyond the merge at hand. The best of 11 pairs on five cells of scripts/bench/simulate.py
(Philly and Lingjun, loads 2 to 5, seeds 0 and 1)."""


class MergeBenefit:
    """Compares a merge with waiting for free GPUs, for the joining job, its host and the queue."""

    def __init__(
        self, tentative: TentativeGroups, order: Sequence[Waiting], num_waiting: int
    ) -> None:
        """Plans when each job would start without merges.

        Args:
            tentative: the groups so far.
            order: the first waiting jobs, in the order in which they would start.
            num_waiting: number of all waiting jobs.
        """
        self._tentative = tentative
        self._room_s: dict[int, float] = {}
        self._now_s = tentative.now_s
        self._num_gpus = tentative.shape.num_gpus
        self._behind = {w.job.index: num_waiting - 1 - i for i, w in enumerate(order)}
        self._starts_s = list_schedule(tentative, order)

    def gain_s(self, waiting: Waiting, host: Group, merged: Group) -> float:
        """Weighted seconds by which jobs end earlier with the merge than without it.

        Three terms: the joining job gains against waiting for GPUs of its own; the host's members
        are slowed while it is there; and the jobs behind it in the queue get the GPU time that it
        does not take. One GPU second brings each of those forward by a second over the number of
        the cluster's GPUs.
        """
        index = waiting.job.index
        joining = next(m for m in merged.members if m.job.index == index)
        end = merged.end_s(joining)
        own_end = self._start_s(waiting) + waiting.isolated_left_s
        delay, last_end = 0.0, end
        pause = merged.ready_s - max(self._now_s, host.ready_s)
        speeds = {m.job.index: m.tokens_per_s for m in merged.members}
        for member in host.members:
            speed = speeds[member.job.index]
            left_s = host.tokens_left(member, self._now_s) / speed
            slowed_s = min(left_s, end - merged.ready_s)
            late = pause + slowed_s * max(0.0, 1 - speed / member.tokens_per_s)
            delay += late
            last_end = max(last_end, host.end_s(member) + late)
        longer = max(0.0, last_end - host.last_end_s) * len(host.gpus)
        saved = waiting.job.num_gpus * waiting.isolated_left_s - longer
        others = self._behind[index] * saved / self._num_gpus
        return own_end - end - _DELAY_WEIGHT * delay + _OTHERS_WEIGHT * others

    def _start_s(self, waiting: Waiting) -> float:
        """The job's start by the list schedule, but not before nodes have room for its GPUs."""
        index, num_gpus = waiting.job.index, waiting.job.num_gpus
        if num_gpus == 1:
            return self._starts_s[index]
        if num_gpus not in self._room_s:
            tentative = self._tentative
            groups = tentative.groups.values()
            _, self._room_s[num_gpus] = soonest_nodes(
                num_gpus, tentative.shape, tentative.free, groups, set()
            )
        return max(self._starts_s[index], self._room_s[num_gpus])


def list_schedule(tentative: TentativeGroups, order: Sequence[Waiting]) -> dict[int, float]:
    """Start times by job index if all jobs run alone, in this order, as GPUs become free.

    Counts GPUs only; on which nodes they are is ignored.
    """
    releases = [(group.last_end_s, len(group.gpus)) for group in tentative.groups.values()]
    heapq.heapify(releases)
    starts, now_s, free = {}, tentative.now_s, tentative.free.num
    for waiting in order:
        needed = waiting.job.num_gpus
        while free < needed and releases:
            end_s, num = heapq.heappop(releases)
            now_s, free = max(now_s, end_s), free + num
        starts[waiting.job.index] = now_s
        free -= needed
        heapq.heappush(releases, (now_s + waiting.isolated_left_s, needed))
    return starts


_MOST_URGENT = 3.0
"""Upper limit of urgency: waiting time over the time that the job takes alone."""

_Ranked = tuple[float, int]
"""A group as (residual capacity, number)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualGrouping:
    """Merges each waiting job into the running group that it fits most tightly."""

    speeds: Speeds
    rules: Rules

    @property
    def keeps_bounds(self) -> bool:
        """True except in the ablation without bounds."""
        return self.rules.keep_bounds

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Starts waiting jobs alone or in running groups; implements `Policy.decide`."""
        rules = self.rules
        tentative = TentativeGroups(now_s, cluster, self.speeds, rules)
        if len(jobs):
            if jobs.overdue(now_s, 1, cluster.may_run):
                shrink(tentative)
            queue = jobs.by_arrival(rules.lookahead, cluster.may_run)
            others = sorted(queue, key=lambda w: self._urgent_first(w, now_s))
            left = start_alone(tentative, jobs, cluster, changes, others)
            if rules.use_residual:
                self._merge(tentative, left, Hosts(tentative, changes))
        elif changes.freed and cluster.free.num:
            separate(tentative, rules)
        return tentative.decisions()

    def _urgent_first(self, waiting: Waiting, now_s: float) -> tuple[float, float, float, int]:
        job = waiting.job
        urgency = min(_MOST_URGENT, (now_s - waiting.queued_s) / max(job.isolated_s, 1.0))
        residual = self.speeds.residual((job.kind,), job.num_gpus)
        return (-job.priority, -urgency, residual, job.index)

    def _merge(self, tentative: TentativeGroups, left: list[Waiting], hosts: Hosts) -> None:
        ranked: dict[tuple[bool, str], list[list[_Ranked]]] = {}
        for waiting in hosts.candidates(left):
            key = (hosts.is_new(waiting), waiting.job.base)
            if key not in ranked:
                ranked[key] = self._tiers(tentative, hosts.of(waiting))
            found = self._tightest(tentative, ranked[key], waiting)
            if found is None:
                continue
            host, proposal = found
            before = self._rank(host)
            tier = tentative.shape.tier(host.gpus)
            group = tentative.accept(proposal, (host,))
            hosts.mark_changed(group)
            for (_, base), tiers in ranked.items():
                if base == group.base:
                    if before in tiers[tier]:
                        tiers[tier].remove(before)
                    insort(tiers[tier], self._rank(group))

    def _rank(self, group: Group) -> _Ranked:
        return (self.speeds.residual(group.kinds, len(group.gpus)), group.number)

    def _tiers(self, tentative: TentativeGroups, groups: list[Group]) -> list[list[_Ranked]]:
        tiers: list[list[_Ranked]] = [[], [], []]
        for group in groups:
            tiers[tentative.shape.tier(group.gpus)].append(self._rank(group))
        return [sorted(tier) for tier in tiers]

    def _tightest(
        self, tentative: TentativeGroups, tiers: list[list[_Ranked]], waiting: Waiting
    ) -> tuple[Group, Proposal] | None:
        """The group with the least residual capacity that takes the job, by binary search.

        The search assumes that every group with more residual capacity takes the job too.
        """
        for tier in tiers:
            low, high = 0, len(tier) - 1
            found = None
            while low <= high:
                middle = (low + high) // 2
                host = tentative.groups[tier[middle][1]]
                proposal = tentative.with_joining(host, waiting)
                if proposal is None or not tentative.trains_more(proposal, host):
                    low = middle + 1
                else:
                    found, high = (host, proposal), middle - 1
            if found is not None:
                return found
        return None
