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

from bisect import insort
from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policies.admission import start_alone
from tlora_megatron.scheduler.policies.hosts import Hosts
from tlora_megatron.scheduler.policies.separation import separate, shrink
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups
from tlora_megatron.scheduler.policy import Changes, Decision, Rules
from tlora_megatron.scheduler.queue import WaitingQueue

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
