"""`tlora` and `tlora_best`: incremental grouping by residual capacity, and by what it brings.

A reconstruction of tLoRA's Adapter Scheduler (arXiv 2602.07263) from public descriptions: the most
urgent job goes to the group that it fits most tightly, by binary search over residual capacity,
first within a node, then a rack, then anywhere. A merge must raise the joint throughput within all
bounds. When nothing waits, fused jobs move to free GPUs if that pays. `tlora_best` takes the
shortest work first, tries several hosts, and wants more of a merge than waiting for free GPUs would
bring.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from tlora_megatron.scheduler.policies.admission import Choose, Grouping, grow, separate, shrink
from tlora_megatron.scheduler.policies.tentative_groups import Hosts, Proposal, TentativeGroups
from tlora_megatron.scheduler.policy import soonest_nodes
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue

_DELAY_WEIGHT, _OTHERS_WEIGHT = 2.0, 3.0
"""A host that takes one joining job will take more, and a queue that is there will last: both count
beyond the merge at hand. The best of 11 pairs on five cells of scripts/bench/simulate.py
(Philly and Lingjun, loads 2 to 5, seeds 0 and 1)."""


class MergeBenefit:
    """Compares a merge with waiting for free GPUs, for the joining job, its host and the queue."""

    def __init__(self, tentative: TentativeGroups, hosts: Hosts) -> None:
        """Plans when each of the first waiting jobs would start without merges."""
        self._now_s = tentative.now_s
        self._num_gpus = tentative.shape.num_gpus
        last = hosts.num_waiting - 1
        self._behind = {w.job.index: last - i for i, w in enumerate(hosts.left)}
        self._starts_s = list_schedule(tentative, hosts.left)

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
        own_end = self._starts_s[index] + waiting.isolated_left_s
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


def list_schedule(tentative: TentativeGroups, order: Sequence[Waiting]) -> dict[int, float]:
    """Start times by job index if all jobs run alone, in this order, by the number of free GPUs.

    No job starts before nodes have room for its GPUs, other waiting jobs left aside.
    """
    shape, free_gpus, groups = tentative.shape, tentative.free, tentative.groups.values()
    releases = [(group.last_end_s, len(group.gpus)) for group in groups]
    heapq.heapify(releases)
    starts, rooms_s, now_s, free = {}, {1: 0.0}, tentative.now_s, tentative.free.num
    for waiting in order:
        needed = waiting.job.num_gpus
        while free < needed and releases:
            end_s, num = heapq.heappop(releases)
            now_s, free = max(now_s, end_s), free + num
        if needed not in rooms_s:
            rooms_s[needed] = soonest_nodes(needed, shape, free_gpus, groups, set())[1]
        starts[waiting.job.index] = max(now_s, rooms_s[needed])
        free -= needed
        heapq.heappush(releases, (now_s + waiting.isolated_left_s, needed))
    return starts


_MOST_URGENT = 3.0
"""Upper limit of urgency: waiting time over the time that the job takes alone."""

_Ranked = tuple[float, int]
"""A group as (residual capacity, number)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualGrouping(Grouping):
    """Merges each waiting job into the running group that it fits most tightly."""

    def _order(self, tentative: TentativeGroups, jobs: WaitingQueue) -> list[Waiting]:
        """The most urgent first; before an overdue one starts, groups give up GPUs."""
        if jobs.overdue(tentative.now_s, 1, tentative.may_run):
            shrink(tentative)
        queue = jobs.by_arrival(self.rules.lookahead, tentative.may_run)
        return sorted(queue, key=lambda w: self._urgent_first(w, tentative.now_s))

    def _spread(self, tentative: TentativeGroups) -> None:
        separate(tentative)

    def _urgent_first(self, waiting: Waiting, now_s: float) -> tuple[float, float, float, int]:
        job = waiting.job
        urgency = min(_MOST_URGENT, (now_s - waiting.queued_s) / max(job.isolated_s, 1.0))
        residual = self.speeds.residual((job.kind,), job.num_gpus)
        return (-job.priority, -urgency, residual, job.index)

    def _merge(self, tentative: TentativeGroups, hosts: Hosts) -> None:
        ranked: dict[tuple[bool, str], list[list[_Ranked]]] = {}
        for waiting in hosts.candidates():
            key = (hosts.is_new(waiting), waiting.job.base)
            if key not in ranked:
                ranked[key] = [[], [], []]
                for group in hosts.of(waiting):
                    insort(ranked[key][tentative.shape.tier(group.gpus)], self._rank(group))
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

    def _tightest(
        self, tentative: TentativeGroups, tiers: list[list[_Ranked]], waiting: Waiting
    ) -> tuple[Group, Proposal] | None:
        """The group with the least residual capacity that takes the job, by binary search."""
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


_MOST_HOSTS = 8
"""Hosts tried for a job, most residual capacity first; limits the time a decision takes."""
EXPECTED = 0.05
"""Added to the number of jobs that wait, so that a job never takes GPUs that bring it nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetBenefit(Grouping):
    """Merges a waiting job where that brings forward the ends of all jobs most."""

    shortest_first: bool = True

    def _chooser(self, order: Sequence[Waiting]) -> Choose:
        """Chooses as many GPUs as a job asks for, or fewer if others wait for the rest."""
        demand = [0, *accumulate(waiting.job.num_gpus for waiting in order)]
        places = {waiting.job.index: place for place, waiting in enumerate(order)}

        def choose(tentative: TentativeGroups, waiting: Waiting) -> Proposal | None:
            asked, place = waiting.job.num_gpus, places[waiting.job.index]
            # Jobs behind it in the queue that could not start beside it now.
            room = demand[place] + tentative.free.num
            others = len(demand) - max(place + 2, bisect_right(demand, room))
            sizes = [asked >> power for power in range(asked.bit_length())]
            for size in sorted(sizes, key=lambda size: _cost_s(tentative, waiting, size, others)):
                proposal = tentative.alone(waiting, size)
                if proposal is not None:
                    return proposal if _ends_earlier(tentative, waiting, proposal) else None
            return None

        return choose

    def _spread(self, tentative: TentativeGroups) -> None:
        separate(tentative)
        grow(tentative)

    def _merge(self, tentative: TentativeGroups, hosts: Hosts) -> None:
        if hosts.candidates():
            benefit = MergeBenefit(tentative, hosts)
            hosts.merge_each(partial(self._best_host, tentative, benefit))

    def _best_host(
        self,
        tentative: TentativeGroups,
        benefit: MergeBenefit,
        waiting: Waiting,
        groups: list[Group],
    ) -> tuple[Group, Proposal] | bool:
        """The best host and its merge; if no merge pays, whether any host could take the job."""
        best, most, possible = None, 0.0, False
        roomy = [host for host in groups if tentative.has_room(host, waiting)]
        roomy.sort(
            key=lambda host: (-self.speeds.residual(host.kinds, len(host.gpus)), host.number)
        )
        for host in roomy[:_MOST_HOSTS]:
            proposal = tentative.with_joining(host, waiting)
            if proposal is None or not tentative.trains_more(proposal, host):
                continue
            possible = True
            gain = benefit.gain_s(waiting, host, proposal.group)
            if gain > most:
                best, most = (host, proposal), gain
        return possible if best is None else best


def _ends_earlier(tentative: TentativeGroups, waiting: Waiting, proposal: Proposal) -> bool:
    """True if fewer GPUs now let the job end earlier than all its GPUs later."""
    if tentative.free.find(waiting.job.num_gpus) is not None:
        return True
    later_s = list_schedule(tentative, (waiting,))[waiting.job.index]
    return proposal.group.last_end_s <= later_s + waiting.isolated_left_s


def _cost_s(
    tentative: TentativeGroups, waiting: Waiting, num_gpus: int, others: int
) -> tuple[float, int]:
    """Sort key: the job's own time plus the time by which it delays others, then fewer GPUs."""
    rates = tentative.speeds.rates((waiting.job.kind,), num_gpus)
    if rates is None:
        return (float("inf"), num_gpus)
    time_s = waiting.tokens_left / rates.total
    others_share = (others + EXPECTED) / tentative.shape.num_gpus
    return (time_s * (1 + others_share * num_gpus), num_gpus)
