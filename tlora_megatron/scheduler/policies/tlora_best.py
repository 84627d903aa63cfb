"""`tlora_best`: the same moves as `tlora`, each weighed by what it does to all completion times.

What differs: shortest work first; several hosts are tried, since a host with more residual capacity
may refuse a job that one with less takes; a merge must bring more than waiting for free GPUs would,
with the delay of the host's members and the GPU time it saves the queue in the balance; a job may
start on fewer GPUs than it asks for, and groups get them back when nothing waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policies.admission import Choose, start_alone
from tlora_megatron.scheduler.policies.hosts import Hosts
from tlora_megatron.scheduler.policies.merge_benefit import Outlook, list_schedule
from tlora_megatron.scheduler.policies.separation import grow, separate
from tlora_megatron.scheduler.policies.tentative_groups import Draft, Proposal
from tlora_megatron.scheduler.policy import Decision, Rules
from tlora_megatron.scheduler.queue import WaitingQueue

_MOST_HOSTS = 8
"""Hosts tried for a job, those with most residual capacity first: bounds the time to decide."""
_EXPECTED = 0.05
"""Jobs that count as held up beside those that are: GPUs that bring nothing are left to others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetBenefit:
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
            others = jobs.by_size(rules.lookahead, cluster.may_run)
            left = start_alone(draft, jobs, cluster, others, self._sizes(cluster))
            if rules.use_residual:
                self._merge(draft, left, Hosts(draft, jobs, cluster), len(jobs))
        elif cluster.freed and cluster.free.num:
            separate(draft, rules)
            grow(draft)
        return draft.decisions()

    def _sizes(self, cluster: ClusterState) -> Callable[[Sequence[Waiting]], Choose]:
        return lambda order: _Sizes(self.speeds, order, cluster).choose

    def _merge(self, draft: Draft, left: list[Waiting], hosts: Hosts, num_waiting: int) -> None:
        refused: set[tuple[int, int, bool]] = set()
        candidates = hosts.candidates(left)
        if not candidates:
            return
        outlook = Outlook(draft, left, num_waiting)
        for waiting in candidates:
            key = (waiting.job.kind, waiting.job.num_gpus, hosts.is_new(waiting))
            if key in refused:
                continue
            found = self._best_host(draft, hosts.of(waiting), waiting, outlook)
            if isinstance(found, bool):
                if not found and draft.within_quota(waiting):
                    refused.add(key)
                continue
            host, proposal = found
            hosts.touched(draft.accept(proposal, (host,)))

    def _best_host(
        self, draft: Draft, groups: list[Group], waiting: Waiting, outlook: Outlook
    ) -> tuple[Group, Proposal] | bool:
        """The host and the merge that bring most; otherwise whether any host could take the job."""
        best, most, possible = None, 0.0, False
        roomy = [host for host in groups if draft.has_room(host, waiting)]
        roomy.sort(key=lambda host: (-self._residual(host), host.number))
        for host in roomy[:_MOST_HOSTS]:
            proposal = draft.with_newcomer(host, waiting)
            if proposal is None or not draft.trains_more(proposal, host):
                continue
            possible = True
            gain = outlook.gain_s(waiting, host, proposal.group)
            if gain > most:
                best, most = (host, proposal), gain
        return possible if best is None else best

    def _residual(self, group: Group) -> float:
        return self.speeds.residual(group.kinds, len(group.gpus))


class _Sizes:
    """On how many GPUs a job starts: fewer than it asks for where others wait for the rest."""

    def __init__(self, speeds: Speeds, order: Sequence[Waiting], cluster: ClusterState) -> None:
        self._speeds = speeds
        self._num_gpus = cluster.shape.num_gpus
        asked = [waiting.job.num_gpus for waiting in order]
        self._demand = [0, *accumulate(asked)]
        self._place = {waiting.job.index: place for place, waiting in enumerate(order)}

    def choose(self, draft: Draft, waiting: Waiting) -> Proposal | None:
        """The best size that free GPUs and the job's bound allow."""
        asked = waiting.job.num_gpus
        others = self._held_up(draft, waiting)
        for size in sorted(_halvings(asked), key=lambda size: self._cost_s(waiting, size, others)):
            proposal = draft.alone(waiting, size)
            if proposal is not None:
                return proposal if self._ends_earlier(draft, waiting, proposal.group) else None
        return None

    def _ends_earlier(self, draft: Draft, waiting: Waiting, group: Group) -> bool:
        """Whether fewer GPUs now are better for the job than those it asks for later."""
        if draft.free.find(waiting.job.num_gpus) is not None:
            return True
        later_s = list_schedule(draft, (waiting,))[waiting.job.index]
        return group.last_end_s <= later_s + waiting.isolated_left_s

    def _held_up(self, draft: Draft, waiting: Waiting) -> int:
        """Jobs behind it that would not start now beside it."""
        place = self._place[waiting.job.index]
        room = self._demand[place] + draft.free.num
        return len(self._demand) - max(place + 2, bisect_right(self._demand, room))

    def _cost_s(self, waiting: Waiting, num_gpus: int, others: int) -> tuple[float, int]:
        """Its own time, and what its GPU time costs the others; fewer GPUs where that is equal.

        Each GPU second puts every job that is held up off by a second over the cluster's GPUs.
        """
        rates = self._speeds.rates((waiting.job.kind,), num_gpus)
        if rates is None:
            return (float("inf"), num_gpus)
        time_s = waiting.tokens_left / rates.total
        others_share = (others + _EXPECTED) / self._num_gpus
        return (time_s * (1 + others_share * num_gpus), num_gpus)


def _halvings(num: int) -> tuple[int, ...]:
    """The number, half of it, and so on down to 1."""
    sizes = [num]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)
