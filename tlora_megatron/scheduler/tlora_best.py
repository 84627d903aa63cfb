"""`tlora_best`: the same moves as `tlora`, each weighed by what it does to all completion times.

What differs: shortest work first; every host is tried, since a host with more residual capacity
may refuse a job that one with less takes; a merge must bring more than waiting for free GPUs would,
with the delay of the host's members and the GPU time it saves the queue in the balance; a job may
start on fewer GPUs than it asks for, and groups get them back when nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlora_megatron.scheduler.admission import in_turn, overdue, start_alone
from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.draft import Draft, Proposal
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.hosts import Hosts
from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.outlook import Outlook
from tlora_megatron.scheduler.policy import Decision, Rules
from tlora_megatron.scheduler.queue import WaitingQueue
from tlora_megatron.scheduler.separation import grow, separate


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
            late = overdue(now_s, jobs, cluster, rules)
            order = in_turn(late, jobs.by_size(rules.lookahead, cluster.may_run))
            sizes = _Sizes(self.speeds, order, len(jobs), cluster)
            left = start_alone(draft, order, len(late), sizes.choose)
            if rules.use_residual:
                self._merge(draft, left, Hosts(draft, jobs, cluster), len(jobs))
        elif cluster.freed and cluster.free.num:
            separate(draft, rules)
            grow(draft)
        return draft.decisions()

    def _merge(self, draft: Draft, left: list[Waiting], hosts: Hosts, num_waiting: int) -> None:
        outlook = Outlook(draft, left, num_waiting)
        refused: set[tuple[int, int, bool]] = set()
        for waiting in hosts.candidates(left):
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
        for host in groups:
            proposal = draft.with_newcomer(host, waiting)
            if proposal is None:
                continue
            possible = True
            gain = outlook.gain_s(waiting, host, proposal.group)
            if gain > most:
                best, most = (host, proposal), gain
        return possible if best is None else best


class _Sizes:
    """On how many GPUs a job starts: fewer than it asks for where others wait for the rest."""

    def __init__(
        self, speeds: Speeds, order: list[Waiting], num_waiting: int, cluster: ClusterState
    ) -> None:
        self._speeds = speeds
        self._crowded = sum(w.job.num_gpus for w in order) > cluster.free.num
        self._weight = (num_waiting - 1) / cluster.shape.num_gpus

    def choose(self, draft: Draft, waiting: Waiting) -> Proposal | None:
        """The best size that free GPUs and the job's bound allow."""
        asked = waiting.job.num_gpus
        sizes = _halvings(asked) if self._crowded else (asked,)
        for size in sorted(sizes, key=lambda size: self._cost_s(waiting, size)):
            proposal = draft.alone(waiting, size)
            if proposal is not None:
                return proposal
        return None

    def _cost_s(self, waiting: Waiting, num_gpus: int) -> tuple[float, int]:
        """Its own time, and what its GPU seconds cost all others; fewer GPUs where that is equal.

        Each GPU second brings every other waiting job back by a second over the cluster's GPUs.
        """
        rates = self._speeds.rates((waiting.job.kind,), num_gpus)
        if rates is None:
            return (float("inf"), num_gpus)
        time_s = waiting.tokens_left / rates.total
        return (time_s * (1 + self._weight * num_gpus), num_gpus)


def _halvings(num: int) -> tuple[int, ...]:
    """The number, half of it, and so on down to 1."""
    sizes = [num]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)
