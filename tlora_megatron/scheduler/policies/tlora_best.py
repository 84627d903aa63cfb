"""`tlora_best`: the moves of `tlora`, each weighed by its effect on all completion times.

Differences from `tlora`: the shortest work comes first. Several hosts are tried, because a host
with more residual capacity may refuse a job that one with less takes. A merge must bring more than
waiting for free GPUs would, counting the delay of the host's members and the GPU time that the
queue saves. A job may start on fewer GPUs than it asks for; groups get the rest when nothing waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.admission import Choose, start_alone
from tlora_megatron.scheduler.policies.separation import grow, separate
from tlora_megatron.scheduler.policies.tentative_groups import Hosts, Proposal, TentativeGroups
from tlora_megatron.scheduler.policies.tlora import MergeBenefit, list_schedule
from tlora_megatron.scheduler.policy import Changes, Decision, Rules
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue

_MOST_HOSTS = 8
"""Hosts tried for a job, most residual capacity first; limits the time a decision takes."""
_EXPECTED = 0.05
"""Added to the number of jobs held up, so that a job never takes GPUs that bring it nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetBenefit:
    """Merges a waiting job where that brings forward the ends of all jobs most."""

    speeds: Speeds
    rules: Rules

    @property
    def keeps_bounds(self) -> bool:
        """True except in the ablation without bounds."""
        return self.rules.keep_bounds

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Starts, merges, splits or widens groups; implements `Policy.decide`."""
        rules = self.rules
        tentative = TentativeGroups(now_s, cluster, self.speeds, rules)
        if len(jobs):
            others = jobs.by_size(rules.lookahead, cluster.may_run)
            left = start_alone(tentative, jobs, cluster, changes, others, self._sizes(cluster))
            if rules.use_residual:
                self._merge(tentative, left, Hosts(tentative, changes), len(jobs))
        elif changes.freed and cluster.free.num:
            separate(tentative, rules)
            grow(tentative)
        return tentative.decisions()

    def _sizes(self, cluster: ClusterState) -> Callable[[Sequence[Waiting]], Choose]:
        return lambda order: _Sizes(self.speeds, order, cluster).choose

    def _merge(
        self, tentative: TentativeGroups, left: list[Waiting], hosts: Hosts, num_waiting: int
    ) -> None:
        refused: set[tuple[int, int, bool]] = set()
        candidates = hosts.candidates(left)
        if not candidates:
            return
        benefit = MergeBenefit(tentative, left, num_waiting)
        for waiting in candidates:
            key = (waiting.job.kind, waiting.job.num_gpus, hosts.is_new(waiting))
            if key in refused:
                continue
            found = self._best_host(tentative, hosts.of(waiting), waiting, benefit)
            if isinstance(found, bool):
                if not found and tentative.within_quota(waiting):
                    refused.add(key)
                continue
            host, proposal = found
            hosts.mark_changed(tentative.accept(proposal, (host,)))

    def _best_host(
        self,
        tentative: TentativeGroups,
        groups: list[Group],
        waiting: Waiting,
        benefit: MergeBenefit,
    ) -> tuple[Group, Proposal] | bool:
        """The best host and its merge; if no merge pays, whether any host could take the job."""
        best, most, possible = None, 0.0, False
        roomy = [host for host in groups if tentative.has_room(host, waiting)]
        roomy.sort(key=lambda host: (-self._residual(host), host.number))
        for host in roomy[:_MOST_HOSTS]:
            proposal = tentative.with_joining(host, waiting)
            if proposal is None or not tentative.trains_more(proposal, host):
                continue
            possible = True
            gain = benefit.gain_s(waiting, host, proposal.group)
            if gain > most:
                best, most = (host, proposal), gain
        return possible if best is None else best

    def _residual(self, group: Group) -> float:
        return self.speeds.residual(group.kinds, len(group.gpus))


class _Sizes:
    """Chooses on how many GPUs a job starts: fewer than it asks for if others wait for the rest."""

    def __init__(self, speeds: Speeds, order: Sequence[Waiting], cluster: ClusterState) -> None:
        self._speeds = speeds
        self._num_gpus = cluster.shape.num_gpus
        asked = [waiting.job.num_gpus for waiting in order]
        self._demand = [0, *accumulate(asked)]
        self._place = {waiting.job.index: place for place, waiting in enumerate(order)}

    def choose(self, tentative: TentativeGroups, waiting: Waiting) -> Proposal | None:
        """Proposes the best number of GPUs that the free ones and the job's bound allow."""
        asked = waiting.job.num_gpus
        others = self._held_up(tentative, waiting)
        for size in sorted(_halvings(asked), key=lambda size: self._cost_s(waiting, size, others)):
            proposal = tentative.alone(waiting, size)
            if proposal is not None:
                return proposal if self._ends_earlier(tentative, waiting, proposal.group) else None
        return None

    def _ends_earlier(self, tentative: TentativeGroups, waiting: Waiting, group: Group) -> bool:
        """True if fewer GPUs now let the job end earlier than all its GPUs later."""
        if tentative.free.find(waiting.job.num_gpus) is not None:
            return True
        later_s = list_schedule(tentative, (waiting,))[waiting.job.index]
        return group.last_end_s <= later_s + waiting.isolated_left_s

    def _held_up(self, tentative: TentativeGroups, waiting: Waiting) -> int:
        """Number of jobs behind it in the queue that could not start beside it now."""
        place = self._place[waiting.job.index]
        room = self._demand[place] + tentative.free.num
        return len(self._demand) - max(place + 2, bisect_right(self._demand, room))

    def _cost_s(self, waiting: Waiting, num_gpus: int, others: int) -> tuple[float, int]:
        """Sort key: the job's own time plus what its GPU time costs the others, then fewer GPUs.

        Each GPU second delays every job that is held up by a second over the cluster's GPUs.
        """
        rates = self._speeds.rates((waiting.job.kind,), num_gpus)
        if rates is None:
            return (float("inf"), num_gpus)
        time_s = waiting.tokens_left / rates.total
        others_share = (others + _EXPECTED) / self._num_gpus
        return (time_s * (1 + others_share * num_gpus), num_gpus)


def _halvings(num: int) -> tuple[int, ...]:
    """The number, half of it, and so on down to 1, rounded down."""
    sizes = [num]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)
