"""`tlora`: residual-capacity-aware hierarchical incremental grouping.

A reconstruction of tLoRA's Adapter Scheduler (arXiv 2602.07263) from public descriptions. Queue by
urgency, then residual capacity; a popped job looks for the running group that it fits most tightly
by a binary search over the groups sorted by residual capacity, first within nodes, then racks, then
the cluster; a merge needs more joint throughput than its parts have and every member within its
slowdown bound; the merged group goes back among the candidates. When nothing waits, fused jobs move
to free GPUs where the parts train faster than the whole.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policies.admission import start_alone
from tlora_megatron.scheduler.policies.hosts import Hosts
from tlora_megatron.scheduler.policies.separation import separate
from tlora_megatron.scheduler.policies.tentative_groups import Draft, Proposal
from tlora_megatron.scheduler.policy import Decision, Rules
from tlora_megatron.scheduler.queue import WaitingQueue

_MOST_URGENT = 3.0
"""Waiting time over time alone counts up to here."""

_Ranked = tuple[float, int]
"""Residual capacity and number of a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualGrouping:
    """See the module."""

    speeds: Speeds
    rules: Rules

    @property
    def keeps_bounds(self) -> bool:
        """All but the ablation."""
        return self.rules.keep_bounds

    def decide(self, now_s: float, jobs: WaitingQueue, cluster: ClusterState) -> list[Decision]:
        """See `Policy.decide`."""
        rules = self.rules
        draft = Draft(now_s, cluster, self.speeds, rules)
        if len(jobs):
            queue = jobs.by_arrival(rules.lookahead, cluster.may_run)
            others = sorted(queue, key=lambda w: self._urgent_first(w, now_s))
            left = start_alone(draft, jobs, cluster, others)
            if rules.use_residual:
                self._merge(draft, left, Hosts(draft, jobs, cluster))
        elif cluster.freed and cluster.free.num:
            separate(draft, rules)
        return draft.decisions()

    def _urgent_first(self, waiting: Waiting, now_s: float) -> tuple[float, float, float, int]:
        job = waiting.job
        urgency = min(_MOST_URGENT, (now_s - waiting.queued_s) / max(job.isolated_s, 1.0))
        residual = self.speeds.residual((job.kind,), job.num_gpus)
        return (-job.priority, -urgency, residual, job.index)

    def _merge(self, draft: Draft, left: list[Waiting], hosts: Hosts) -> None:
        ranked: dict[tuple[bool, str], list[list[_Ranked]]] = {}
        for waiting in hosts.candidates(left):
            key = (hosts.is_new(waiting), waiting.job.base)
            if key not in ranked:
                ranked[key] = self._tiers(draft, hosts.of(waiting))
            found = self._tightest(draft, ranked[key], waiting)
            if found is None:
                continue
            host, proposal = found
            before = self._rank(host)
            tier = draft.shape.tier(host.gpus)
            group = draft.accept(proposal, (host,))
            hosts.touched(group)
            for (_, base), tiers in ranked.items():
                if base == group.base:
                    if before in tiers[tier]:
                        tiers[tier].remove(before)
                    insort(tiers[tier], self._rank(group))

    def _rank(self, group: Group) -> _Ranked:
        return (self.speeds.residual(group.kinds, len(group.gpus)), group.number)

    def _tiers(self, draft: Draft, groups: list[Group]) -> list[list[_Ranked]]:
        tiers: list[list[_Ranked]] = [[], [], []]
        for group in groups:
            tiers[draft.shape.tier(group.gpus)].append(self._rank(group))
        return [sorted(tier) for tier in tiers]

    def _tightest(
        self, draft: Draft, tiers: list[list[_Ranked]], waiting: Waiting
    ) -> tuple[Group, Proposal] | None:
        """The group of least residual that takes the job, as if all with more did too."""
        for tier in tiers:
            low, high = 0, len(tier) - 1
            found = None
            while low <= high:
                middle = (low + high) // 2
                host = draft.groups[tier[middle][1]]
                proposal = draft.with_newcomer(host, waiting)
                if proposal is None or not draft.trains_more(proposal, host):
                    low = middle + 1
                else:
                    found, high = (host, proposal), middle - 1
            if found is not None:
                return found
        return None
