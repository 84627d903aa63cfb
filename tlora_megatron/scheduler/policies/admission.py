"""The queue discipline that all policies share, and those that have little more than it.

`isolated` and `isolated_sjf` start jobs alone. `mlora` groups them as long as memory lasts, after
mLoRA's scheduler (arXiv 2312.02515): as many tasks as memory allows, in order, without checking how
much slower the others become.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlora_megatron.scheduler.fleet import Parts
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.tentative_groups import Hosts, Proposal, TentativeGroups
from tlora_megatron.scheduler.policy import Changes, ClusterState, Decision, Rules
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue

Choose = Callable[[TentativeGroups, Waiting], Proposal | None]
"""Chooses the GPUs on which a job would start; None if there are none for it."""


def separate(
    tentative: TentativeGroups, may_split: Callable[[Group], bool] = lambda group: True
) -> None:
    """Moves members of fused groups to free GPUs, the oldest group first, as long as it pays.

    It pays if the parts train more tokens per second than the whole, and the members' end times
    sum to less although the group stands still during the move.
    """
    fused = [group for group in tentative.groups.values() if len(group.members) > 1]
    for group in sorted(fused, key=lambda group: (group.formed_s, group.number)):
        if not tentative.free.num:
            return
        while len(group.members) > 1 and may_split(group):
            found = _best_leaver(tentative, group)
            if found is None:
                break
            rest, own = found
            group = tentative.accept(rest, (group,))
            tentative.accept(own)


def grow(tentative: TentativeGroups) -> None:
    """Widens groups that have fewer GPUs than a member asks for, if their members end earlier."""
    for group in sorted(tentative.groups.values(), key=lambda group: group.number):
        asked = max(member.job.num_gpus for member in group.members)
        if not tentative.free.num or asked <= len(group.gpus):
            continue
        larger = tentative.wider(group, asked)
        if larger is not None and _sum_of_ends(larger.group) < _sum_of_ends(group):
            tentative.accept(larger, (group,))


def shrink(tentative: TentativeGroups) -> None:
    """Takes from groups the GPUs that no member asks for any more, as far as bounds allow."""
    for group in sorted(tentative.groups.values(), key=lambda group: group.number):
        size = max(member.job.num_gpus for member in group.members)
        while size < len(group.gpus):
            smaller = tentative.propose(tentative.parts_of(group), group.gpus[:size], group)
            if smaller is not None:
                tentative.accept(smaller, (group,))
                break
            size *= 2


def _best_leaver(tentative: TentativeGroups, group: Group) -> tuple[Proposal, Proposal] | None:
    """Proposals for the best split: the remaining group, and the member that leaves it alone."""
    parts = tentative.parts_of(group)
    best, most_saved = None, 0.0
    for place, (_, member) in enumerate(parts.running):
        gpus = tentative.free.find(member.job.num_gpus)
        if gpus is None:
            continue
        others = parts.running[:place] + parts.running[place + 1 :]
        rest = tentative.propose(Parts(running=others, joining=parts.joining), group.gpus, group)
        own = tentative.propose(Parts(running=(parts.running[place],)), gpus)
        if rest is None or own is None:
            continue
        joint = rest.group.tokens_per_s + own.group.tokens_per_s
        saved = _sum_of_ends(group) - _sum_of_ends(rest.group) - _sum_of_ends(own.group)
        if joint > group.tokens_per_s * (1 + tentative.rules.min_gain) and saved > most_saved:
            best, most_saved = (rest, own), saved
    return best


def _sum_of_ends(group: Group) -> float:
    return sum(group.end_s(member) for member in group.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """Starts jobs alone, and lets those that are left join groups; implements `Policy`."""

    speeds: Speeds
    rules: Rules
    shortest_first: bool = False
    """Order jobs by the time they take alone; False: by submission."""

    @property
    def keeps_bounds(self) -> bool:
        """True except in the ablation without bounds."""
        return self.rules.keep_bounds

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Starts, merges or splits groups."""
        tentative = TentativeGroups(now_s, cluster, self.speeds, self.rules)
        if len(jobs):
            left = self._start(tentative, jobs, changes)
            if self.rules.use_residual:
                self._merge(tentative, Hosts(tentative, changes, left, len(jobs)))
        elif changes.freed and cluster.free.num:
            self._spread(tentative)
        return tentative.decisions()

    def _start(
        self, tentative: TentativeGroups, jobs: WaitingQueue, changes: Changes
    ) -> list[Waiting]:
        """Starts jobs alone on free GPUs, in order, and returns those that still wait.

        Overdue jobs come first, the longest overdue at the front whatever their priority. A job
        that does not fit lets the next ones pass. If it is overdue, the nodes that can take it
        first are reserved for it (backfilling): no job that would be in its way starts there. If
        no GPUs became free, a job that is neither overdue nor new is skipped.
        """
        others = self._order(tentative, jobs)
        overdue = jobs.overdue(tentative.now_s, self.rules.lookahead, tentative.may_run)
        first = {waiting.job.index for waiting in overdue}
        order = [*overdue, *(waiting for waiting in others if waiting.job.index not in first)]
        choose, refused = self._chooser(order), set[tuple[int, int]]()
        left: list[Waiting] = []
        for waiting in order:
            job, is_overdue, proposal = waiting.job, waiting.job.index in first, None
            if is_overdue or changes.freed or job.index in changes.arrived:
                kind = job.kind, job.num_gpus
                if kind not in refused and (tentative.free.num or is_overdue):
                    proposal = choose(tentative, waiting)
                    if proposal is None and tentative.within_quota(waiting):
                        refused.add(kind)
                        if is_overdue:
                            tentative.reserve(job.num_gpus)
                proposal = proposal or tentative.on_reserved_gpus(waiting)
            if proposal is None:
                left.append(waiting)
            else:
                tentative.accept(proposal)
        return left

    def _order(self, tentative: TentativeGroups, jobs: WaitingQueue) -> list[Waiting]:
        """The first of the jobs that wait, in the order in which they are started."""
        ordered = jobs.by_size if self.shortest_first else jobs.by_arrival
        return ordered(self.rules.lookahead, tentative.may_run)

    def _chooser(self, order: Sequence[Waiting]) -> Choose:
        """Chooses as many GPUs as a job asks for."""
        return lambda tentative, waiting: tentative.alone(waiting, waiting.job.num_gpus)

    def _merge(self, tentative: TentativeGroups, hosts: Hosts) -> None:
        """Adds jobs that found no GPUs to running groups."""

    def _spread(self, tentative: TentativeGroups) -> None:
        """Uses GPUs for which nobody waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDriven(Grouping):
    """Uses free GPUs first; then the host with fewest members that has the memory."""

    def _merge(self, tentative: TentativeGroups, hosts: Hosts) -> None:
        """Adds each job to the first host with room."""

        def first(waiting: Waiting, groups: list[Group]) -> tuple[Group, Proposal] | bool:
            wide = [host for host in groups if len(host.gpus) >= waiting.job.num_gpus]
            for host in sorted(wide, key=lambda host: (len(host.members), host.number)):
                if (proposal := tentative.with_joining(host, waiting)) is not None:
                    return host, proposal
            return False

        hosts.merge_each(first)
