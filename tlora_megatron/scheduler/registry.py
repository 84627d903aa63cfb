"""`isolated`, `isolated_sjf` and `mlora`: jobs alone, or in groups as long as memory lasts.

After mLoRA's scheduler (arXiv 2312.02515): as many tasks as memory allows, in order, without
checking how much slower the others become.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tlora_megatron.config.reader import must, nearest
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.admission import start_alone
from tlora_megatron.scheduler.policies.elastic import Elastic
from tlora_megatron.scheduler.policies.tentative_groups import Hosts, TentativeGroups
from tlora_megatron.scheduler.policies.tlora import NetBenefit, ResidualGrouping
from tlora_megatron.scheduler.policy import Changes, ClusterState, Decision, Policy, Rules
from tlora_megatron.scheduler.queue import Waiting, WaitingQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolated:
    """Starts jobs alone, in order; a job that does not fit lets others pass until it is overdue."""

    speeds: Speeds
    rules: Rules
    shortest_first: bool = False
    """Order jobs by the time they take alone; False: by submission."""
    keeps_bounds: bool = True

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Starts waiting jobs on free GPUs; implements `Policy.decide`."""
        if not len(jobs) or not cluster.free.num:
            return []
        ordered = jobs.by_size if self.shortest_first else jobs.by_arrival
        others = ordered(self.rules.lookahead, cluster.may_run)
        tentative = TentativeGroups(now_s, cluster, self.speeds, self.rules)
        start_alone(tentative, jobs, cluster, changes, others)
        return tentative.decisions()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDriven:
    """Uses free GPUs first; then the host with fewest members that has the memory."""

    speeds: Speeds
    rules: Rules
    keeps_bounds: bool = False

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Starts waiting jobs alone or in running groups; implements `Policy.decide`."""
        if not len(jobs):
            return []
        rules = replace(self.rules, keep_bounds=False)
        others = jobs.by_arrival(rules.lookahead, cluster.may_run)
        tentative = TentativeGroups(now_s, cluster, self.speeds, rules)
        left = start_alone(tentative, jobs, cluster, changes, others)
        _merge(tentative, left, Hosts(tentative, changes))
        return tentative.decisions()


def _merge(tentative: TentativeGroups, left: list[Waiting], hosts: Hosts) -> None:
    """Adds each job to the first host with room; asks once for all equal jobs."""
    refused: set[tuple[int, int, bool]] = set()
    for waiting in hosts.candidates(left):
        key = (waiting.job.kind, waiting.job.num_gpus, hosts.is_new(waiting))
        if key in refused:
            continue
        wide = [host for host in hosts.of(waiting) if len(host.gpus) >= waiting.job.num_gpus]
        for host in sorted(wide, key=lambda host: (len(host.members), host.number)):
            proposal = tentative.with_joining(host, waiting)
            if proposal is not None:
                hosts.mark_changed(tentative.accept(proposal, (host,)))
                break
        else:
            if tentative.within_quota(waiting):
                refused.add(key)


def _right_sized(speeds: Speeds, rules: Rules) -> Policy:
    """Shortest job first, each alone on the GPUs that serve it best."""
    return NetBenefit(speeds=speeds, rules=replace(rules, use_residual=False))


POLICIES: dict[str, Callable[..., Policy]] = {
    "isolated": Isolated,
    "isolated_sjf": partial(Isolated, shortest_first=True),
    "sjf_rightsize": _right_sized,
    "mlora": MemoryDriven,
    "tlora": ResidualGrouping,
    "tlora_best": NetBenefit,
    "tlora_elastic": Elastic,
}

DEFAULT_POLICY = "tlora_elastic"
"""The policy of a live service."""

WEIGH_MOVES = frozenset({"tlora_elastic"})
"""Policies that make a move only where it brings more than its pauses cost."""


def make_policy(name: str, speeds: Speeds, rules: Rules) -> Policy:
    """Makes the policy of this name; raises `ValueError` if no policy has this name."""
    if name not in POLICIES:
        raise must("policy", f"be one of {', '.join(POLICIES)}", name, nearest(name, POLICIES))
    return POLICIES[name](speeds=speeds, rules=rules)
