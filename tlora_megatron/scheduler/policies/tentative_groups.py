"""Groups as a decision would leave them: tried on copies, so that `Policy.decide` stays pure.

Some GPUs are held back: for paused jobs that come back, and for a job that is overdue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from tlora_megatron.scheduler.fleet import Parts, ends_in_bounds, formed, paused, speeds_in_bounds
from tlora_megatron.scheduler.group_throughput import GroupRates, Kinds, Speeds
from tlora_megatron.scheduler.policy import (
    Changes,
    ClusterState,
    Decision,
    FreeGpus,
    Rules,
    soonest_nodes,
)
from tlora_megatron.scheduler.queue import Group, Job, Pause, Waiting, soonest_back_s

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
    """The free GPUs and groups as proposals leave them; new groups' numbers are negative."""

    def __init__(
        self,
        now_s: float,
        cluster: ClusterState,
        speeds: Speeds,
        rules: Rules,
        paused: Iterable[Waiting] = (),
        most_mixes: float = math.inf,
    ) -> None:
        """Begins with the groups that run.

        Args:
            paused: jobs that are to come back to their GPUs.
            most_mixes: different fused groups to look at: the model takes milliseconds for each.
        """
        self.now_s = now_s
        self.shape = cluster.shape
        self.free = cluster.free.copy()
        self.groups = dict(cluster.groups)
        self.may_run = cluster.may_run
        """As of the cluster before this decision."""
        self._cluster = cluster
        self.speeds = speeds
        self.rules = rules
        self._parts: dict[int, Parts] = {}
        self._dissolved: set[int] = set()
        self._placed: set[int] = set()
        self._new = 0
        self._asked: dict[str, int] = {}
        self._reserved: set[int] = set()
        self._reserved_until_s = float("inf")
        self._reservations = 0
        self._kept = FreeGpus(self.shape, [()] * self.shape.num_nodes)
        self._vacated_s: dict[int, float] = {}
        """GPU -> seconds until the state of those who leave it is saved."""
        self._pausing: list[int] = []
        self._pauses = {w.job.index: (w.job.priority, w.pause) for w in paused if w.pause}
        """Job -> its priority, and its claim to the GPUs that it held."""
        self._mixes: set[tuple[Kinds, int]] = set()
        self._most_mixes = most_mixes

    def within_quota(self, waiting: Waiting) -> bool:
        """True if the quota of the job's tenant has room for it beside the accepted proposals."""
        if waiting.pause is not None:
            return True  # its tenant is charged while it is paused
        return self._cluster.within_quota(waiting, self._asked.get(waiting.job.tenant, 0))

    def reserve(self, num_gpus: int) -> None:
        """Reserves, for one of the first jobs, the nodes that become free first."""
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

    def unreserve(self) -> None:
        """Ends all reservations: more urgent jobs than those that are overdue may have the GPUs."""
        for node in self._reserved:
            gpus = self._kept.in_node(node)
            self._kept.take(gpus)
            self.free.give(gpus)
        self._reserved.clear()

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
        """The group of `parts` on `gpus`, under `host`'s number; None if it may not be."""
        keep_bounds = self.rules.keep_bounds
        jobs = parts.jobs
        if len(jobs) > self.rules.max_group_size or (
            keep_bounds and len(jobs) > 1 and self._demands_too_much(jobs, len(gpus))
        ):
            return None
        kinds = parts.kinds
        if len(kinds) > 1:
            self._mixes.add((kinds, len(gpus)))
            if len(self._mixes) > self._most_mixes:
                return None
        rates = self.speeds.rates(kinds, len(gpus))
        if rates is None or (keep_bounds and not self._are_fast(jobs, kinds, len(gpus), rates)):
            return None
        group = formed(
            parts,
            gpus=gpus,
            rates=rates,
            now_s=self.now_s,
            cost=self.rules.cost,
            number=-1 - self._new if host is None else host.number,
            vacated_s=self._vacated_s,
        )
        doubt = self.speeds.doubt(kinds, len(gpus))
        own = [waiting.job.index for waiting in parts.joining]
        if keep_bounds and not ends_in_bounds(group, doubt, own):
            return None
        level = min([waiting.job.priority for waiting in parts.joining], default=-math.inf)
        if group.last_end_s > self.needed_s(gpus, own, level):
            return None
        return Proposal(group=group, parts=parts)

    def _are_fast(self, jobs: list[Job], kinds: Kinds, num_gpus: int, rates: GroupRates) -> bool:
        """True if each job is as fast as its bound demands, though speeds may be wrong."""
        doubt = self.speeds.doubt
        slower = 1 - doubt(kinds, num_gpus)
        least = {}
        for job in jobs:
            if len(jobs) == 1 and job.num_gpus == num_gpus:
                continue  # alone as asked it is as fast as it can be
            alone = 1 + doubt((job.kind,), job.num_gpus)
            least[job.kind] = rates.by_kind[job.kind] * slower / alone
        return speeds_in_bounds([job for job in jobs if job.kind in least], least)

    def trains_more(self, proposal: Proposal, host: Group) -> bool:
        """True if the merge trains enough more tokens, or those who come are driven."""
        there = {member.job.index for member in host.members}
        news = [m.job for m in proposal.group.members if m.job.index not in there]
        if all(job.is_open for job in news):
            return True
        least = host.tokens_per_s * (1 + self.rules.min_gain)
        return proposal.group.tokens_per_s > least

    def has_room(self, host: Group, waiting: Waiting) -> bool:
        """A cheap test that rules out hosts before the model is asked about one more member."""
        if host.base != waiting.job.base or self.is_reserved(host):
            return False
        jobs = [*(member.job for member in host.members), waiting.job]
        return not self.rules.keep_bounds or not self._demands_too_much(jobs, len(host.gpus))

    def _demands_too_much(self, jobs: list[Job], num_gpus: int) -> bool:
        """True if the members' bounds demand more than full speed, which saves searches."""
        least = sum([job.least_tokens_per_s for job in jobs])
        return least > _MOST_OF_FULL * self.speeds.full_speed(jobs[0].kind, num_gpus)

    def with_joining(self, host: Group, waiting: Waiting) -> Proposal | None:
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
        parts = Parts(joining=(waiting,))
        for free in self._first_choices():
            gpus = free.find(num_gpus)
            proposal = None if gpus is None else self.propose(parts, gpus)
            if proposal is not None:
                return proposal
        return None

    def _first_choices(self) -> Iterator[FreeGpus]:
        """The free GPUs that no paused job needs, then all of them."""
        claimed = {gpu for _, pause in self._pauses.values() for gpu in pause.gpus}
        if claimed:
            nodes = map(self.free.in_node, range(self.shape.num_nodes))
            yield FreeGpus(self.shape, [[g for g in gpus if g not in claimed] for gpus in nodes])
        yield self.free

    def needed_s(
        self, gpus: Iterable[int], without: Collection[int] = (), level: float = -math.inf
    ) -> float:
        """When a paused job of this priority or above needs one of these GPUs; infinite if none."""
        claims = self._pauses.items()
        return soonest_back_s(
            (pause for i, (own, pause) in claims if own >= level and i not in without), gpus
        )

    def wider(self, group: Group, num_gpus: int) -> Proposal | None:
        """A group on more GPUs, its own among those it may get; None as in `propose`."""
        free = self.free.copy()
        free.give(group.gpus)
        gpus = free.find(num_gpus)
        return None if gpus is None else self.propose(self.parts_of(group), gpus, group)

    def back_home(self, waiting: Waiting) -> Proposal | None:
        """A paused job on the GPUs that it held; None if it never was, or they are not all free."""
        pause = waiting.pause
        if pause is None or not self.free.holds(pause.gpus):
            return None
        return self.propose(Parts(joining=(waiting,)), pause.gpus)

    def pause(self, group: Group) -> None:
        """Pauses the members of a running group that this decision has not changed."""
        assert not self.is_changed(group), "a group must not be formed and paused at once"
        self._release(group)
        pauses = self.pauses_of(group)
        self._pausing += pauses
        self._pauses |= {m.job.index: (m.job.priority, pauses[m.job.index]) for m in group.members}

    def pauses_of(self, group: Group) -> dict[int, Pause]:
        """The pauses of a running group's members if they began now, by job.

        The one that has most time comes back last, and the others end before it.
        """
        end_by_s, found = self.needed_s(group.gpus), {}
        for member in sorted(group.members, key=lambda m: (-m.deadline_s, m.job.index)):
            cost = self.rules.cost
            pause = paused(group, member, now_s=self.now_s, cost=cost, end_by_s=end_by_s).pause
            assert pause is not None, "a paused job has a claim"
            found[member.job.index] = pause
            end_by_s = min(end_by_s, pause.back_by_s)
        return found

    def has_placed(self, waiting: Waiting) -> bool:
        """True if this decision has given the job a place."""
        return waiting.job.index in self._placed

    def may_move(self, group: Group, *, urgent: bool = False) -> bool:
        """True if a running group may be given other GPUs, or none: for an urgent job even soon."""
        return not (
            self.is_changed(group)
            or self.is_reserved(group)
            or (group.number in self.rules.held and not urgent)
            or any(member.job.is_open for member in group.members)
        )

    def is_changed(self, group: Group) -> bool:
        """True if this decision has formed or changed the group."""
        return group.number in self._parts

    def _release(self, group: Group) -> None:
        """Takes a group off its GPUs."""
        del self.groups[group.number]
        self.free.give(group.gpus)
        self._parts.pop(group.number, None)
        if group.number >= 0 and group.number not in self._dissolved:
            self._dissolved.add(group.number)
            save_s = self.rules.cost.save_s([member.job for member in group.members])
            self._vacated_s.update(dict.fromkeys(group.gpus, save_s))

    def accept(self, proposal: Proposal, replaces: tuple[Group, ...] = ()) -> Group:
        """Adds the proposed group and removes the groups whose members it takes."""
        before = {w.job.index for old in replaces for w in self.parts_of(old).joining}
        for old in replaces:
            self._release(old)
        self._placed.update(w.job.index for w in proposal.parts.joining)
        for waiting in proposal.parts.joining:
            if waiting.job.index not in before and waiting.pause is None:
                tenant = waiting.job.tenant
                self._asked[tenant] = self._asked.get(tenant, 0) + waiting.job.num_gpus
            self._pauses.pop(waiting.job.index, None)
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
            found.append(
                Decision(
                    members=members, gpus=gpus, dissolve=tuple(left), pause=tuple(self._pausing)
                )
            )
            left, self._pausing = [], []
        return found


Find = Callable[[Waiting, list[Group]], tuple[Group, Proposal] | bool]
"""Chooses a job's host and their merge; False if none of the groups can take the job, True if one
could, and does not."""


class Hosts:
    """Jobs that found no GPUs, and groups that may host them, without pairs that were tried."""

    def __init__(
        self, tentative: TentativeGroups, changes: Changes, left: list[Waiting], num_waiting: int
    ) -> None:
        """Begins with the first of so many jobs that wait, in the policy's order."""
        self._tentative = tentative
        self.left, self.num_waiting = left, num_waiting
        self._new = changes.arrived
        self._changed = set(changes.regrouped)

    def is_new(self, waiting: Waiting) -> bool:
        return waiting.job.index in self._new

    def mark_changed(self, group: Group) -> None:
        """Notes that this decision has changed a group, so that old jobs are tried against it."""
        self._changed.add(group.number)

    def candidates(self) -> list[Waiting]:
        """The jobs for which there can be a host."""
        groups = self._tentative.groups
        changed = {groups[number].base for number in self._changed if number in groups}
        return [w for w in self.left if w.job.index in self._new or w.job.base in changed]

    def of(self, waiting: Waiting) -> list[Group]:
        """Groups of the job's base model to try it against, by number."""
        groups = self._tentative.groups
        base = waiting.job.base
        numbers = groups if self.is_new(waiting) else self._changed
        return [groups[n] for n in sorted(numbers) if n in groups and groups[n].base == base]

    def merge_each(self, find: Find) -> None:
        """Adds each job to the host that `find` gives; asks once for all equal jobs."""
        refused: set[tuple[int, int, bool]] = set()
        for waiting in self.candidates():
            key = (waiting.job.kind, waiting.job.num_gpus, self.is_new(waiting))
            found = key not in refused and find(waiting, self.of(waiting))
            if not isinstance(found, bool):
                host, proposal = found
                self.mark_changed(self._tentative.accept(proposal, (host,)))
            elif not found and self._tentative.within_quota(waiting):
                refused.add(key)
