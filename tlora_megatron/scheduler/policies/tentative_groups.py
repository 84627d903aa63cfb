"""Groups as a decision would leave them: tried on copies, so that `Policy.decide` stays pure."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterState, FreeGpus
from tlora_megatron.scheduler.formation import Parts, ends_in_bounds, formed, speeds_in_bounds
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Group, Job, Waiting
from tlora_megatron.scheduler.policies.reservation import soonest_nodes
from tlora_megatron.scheduler.policy import Decision, Rules

_MOST_OF_FULL = 1.05
"""A group may be a little faster than the reference load that defines full speed."""
_MOST_RESERVATIONS = 2
"""Jobs that nodes are reserved for at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A group that could be formed, and the members it is formed from."""

    group: Group
    parts: Parts


class TentativeGroups:
    """The free GPUs and groups that the proposals accepted so far would leave.

    A changed group keeps its number here; a new one gets a negative number.
    """

    def __init__(self, now_s: float, cluster: ClusterState, speeds: Speeds, rules: Rules) -> None:
        self.now_s = now_s
        self.shape = cluster.shape
        self.free = cluster.free.copy()
        self.groups = dict(cluster.groups)
        self._cluster = cluster
        self._speeds = speeds
        self.rules = rules
        self._parts: dict[int, Parts] = {}
        self._dissolved: set[int] = set()
        self._new = 0
        self._asked: dict[str, int] = {}
        self._reserved: set[int] = set()
        self._reserved_until_s = float("inf")
        self._reservations = 0
        self._kept = FreeGpus(self.shape, [()] * self.shape.num_nodes)

    def within_quota(self, waiting: Waiting) -> bool:
        """True if the quota of the job's tenant has room for it beside the accepted proposals."""
        job = waiting.job
        quota = self._cluster.quotas.get(job.tenant)
        if quota is None:
            return True
        held = self._cluster.tenant_gpus.get(job.tenant, 0) + self._asked.get(job.tenant, 0)
        return held + job.num_gpus <= quota

    def reserve(self, num_gpus: int) -> None:
        """Reserves the nodes on which `num_gpus` GPUs become free first.

        Only the first jobs that ask get a reservation; later ones come after them anyway.
        """
        if self._reservations == _MOST_RESERVATIONS:
            return
        self._reservations += 1
        nodes, start_s = soonest_nodes(
            num_gpus, self.shape, self.free, self.groups.values(), self._reserved
        )
        if not nodes:
            return
        self._reserved.update(nodes)
        self._reserved_until_s = min(self._reserved_until_s, start_s)
        for node in nodes:
            gpus = self.free.in_node(node)
            self.free.take(gpus)
            self._kept.give(gpus)

    def on_reserved_gpus(self, waiting: Waiting) -> Proposal | None:
        """The job alone on reserved GPUs if it ends before they are needed; otherwise None."""
        if not self._kept.num or not self.within_quota(waiting):
            return None
        if self.now_s + waiting.isolated_left_s > self._reserved_until_s:
            return None
        gpus = self._kept.find(waiting.job.num_gpus)
        proposal = None if gpus is None else self.propose(Parts(joining=(waiting,)), gpus)
        if proposal is None or proposal.group.last_end_s > self._reserved_until_s:
            return None
        return proposal

    def is_reserved(self, group: Group) -> bool:
        """True if a group runs on a reserved node, where it must not grow."""
        size = self.shape.gpus_per_node
        return bool(self._reserved) and any(gpu // size in self._reserved for gpu in group.gpus)

    def parts_of(self, group: Group) -> Parts:
        """The members that a running or tentative group is formed from."""
        return self._parts.get(group.number) or Parts.of(group)

    def propose(
        self, parts: Parts, gpus: tuple[int, ...], host: Group | None = None
    ) -> Proposal | None:
        """The group of `parts` on `gpus`, with the number of `host` if one is given.

        None if the group is too large, does not fit into memory or breaks a member's bound.
        """
        keep_bounds = self.rules.keep_bounds
        jobs = parts.jobs
        if len(jobs) > self.rules.max_group_size or (
            keep_bounds and len(jobs) > 1 and self._demands_too_much(jobs, len(gpus))
        ):
            return None
        rates = self._speeds.rates(parts.kinds, len(gpus))
        if rates is None or (keep_bounds and not speeds_in_bounds(jobs, rates)):
            return None
        group = formed(
            parts,
            gpus=gpus,
            rates=rates,
            now_s=self.now_s,
            cost=self.rules.cost,
            number=-1 - self._new if host is None else host.number,
        )
        if keep_bounds and not ends_in_bounds(group):
            return None
        return Proposal(group=group, parts=parts)

    def trains_more(self, proposal: Proposal, host: Group) -> bool:
        """True if the merge trains enough more tokens per second than the host alone."""
        least = host.tokens_per_s * (1 + self.rules.min_gain)
        return proposal.group.tokens_per_s > least

    def has_room(self, host: Group, waiting: Waiting) -> bool:
        """A cheap test that rules out hosts before the model is asked about one more member."""
        if host.base != waiting.job.base or self.is_reserved(host):
            return False
        jobs = [*(member.job for member in host.members), waiting.job]
        return not self.rules.keep_bounds or not self._demands_too_much(jobs, len(host.gpus))

    def _demands_too_much(self, jobs: list[Job], num_gpus: int) -> bool:
        """True if the members' bounds together demand more than the GPUs' full speed.

        This sum saves most searches over plans.
        """
        least = sum([job.least_tokens_per_s for job in jobs])
        return least > _MOST_OF_FULL * self._speeds.full_speed(jobs[0].kind, num_gpus)

    def with_newcomer(self, host: Group, waiting: Waiting) -> Proposal | None:
        """The host with one more member; None as in `propose`, or if a quota forbids it."""
        if host.base != waiting.job.base or not self.within_quota(waiting):
            return None
        if self.is_reserved(host):
            return None
        parts = self.parts_of(host) + Parts(joining=(waiting,))
        return self.propose(parts, host.gpus, host)

    def alone(self, waiting: Waiting, num_gpus: int) -> Proposal | None:
        """The job alone on free GPUs; None as in `propose`, beyond a quota or without GPUs."""
        if not self.within_quota(waiting):
            return None
        gpus = self.free.find(num_gpus)
        return None if gpus is None else self.propose(Parts(joining=(waiting,)), gpus)

    def accept(self, proposal: Proposal, replaces: tuple[Group, ...] = ()) -> Group:
        """Adds the proposed group and removes the groups whose members it takes."""
        before = {w.job.index for old in replaces for w in self.parts_of(old).joining}
        for old in replaces:
            del self.groups[old.number]
            self.free.give(old.gpus)
            self._parts.pop(old.number, None)
            if old.number >= 0:
                self._dissolved.add(old.number)
        for waiting in proposal.parts.joining:
            if waiting.job.index not in before:
                tenant = waiting.job.tenant
                self._asked[tenant] = self._asked.get(tenant, 0) + waiting.job.num_gpus
        group = proposal.group
        self._new += group.number < 0
        (self._kept if self.is_reserved(group) else self.free).take(group.gpus)
        self.groups[group.number] = group
        self._parts[group.number] = proposal.parts
        return group

    def decisions(self) -> list[Decision]:
        """The accepted proposals as decisions: changed groups by number, then new ones."""
        left = sorted(self._dissolved)
        found = []
        for number in sorted(self._parts, key=lambda number: (number < 0, abs(number))):
            parts, gpus = self._parts[number], self.groups[number].gpus
            members = tuple(sorted(job.index for job in parts.jobs))
            found.append(Decision(members=members, gpus=gpus, dissolve=tuple(left)))
            left = []
        return found
