"""The policy `tlora_elastic`: groups grow into idle GPUs, and shrink or pause when others wait."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_megatron.scheduler.policies.admission import separate
from tlora_megatron.scheduler.policies.room import MOST_SIZES, PAYS, ElasticGroups, make_room, oust
from tlora_megatron.scheduler.policies.tentative_groups import Hosts, Proposal
from tlora_megatron.scheduler.policies.tlora import NetBenefit, list_schedule
from tlora_megatron.scheduler.policy import Changes, ClusterState, Decision
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue


def join_clients(tentative: ElasticGroups, order: list[Waiting]) -> list[Waiting]:
    """Starts jobs beside clients' where they end no later than by waiting; returns those left."""
    if not any(_is_driven(group) for group in tentative.groups.values()):
        return order
    starts_s = list_schedule(tentative, order)
    left = []
    for waiting in order:
        by_s = starts_s[waiting.job.index] + tentative.least_s(waiting)
        found = None if waiting.pause or waiting.job.is_open else _beside(tentative, waiting, by_s)
        if found is None:
            left.append(waiting)
        else:
            tentative.accept(found[1], (found[0],))
    return left


def _beside(
    tentative: ElasticGroups, waiting: Waiting, by_s: float
) -> tuple[Group, Proposal] | None:
    """The clients' group in which the job ends first, if that is by `by_s`."""
    best, first_s = None, by_s
    for group in list(tentative.groups.values()):
        if not _is_driven(group) or not tentative.has_room(group, waiting):
            continue
        proposal = tentative.with_joining(group, waiting)
        if proposal is None:
            continue
        formed = proposal.group
        end_s = next(formed.end_s(m) for m in formed.members if m.job is waiting.job)
        if end_s <= first_s:
            best, first_s = (group, proposal), end_s
    return best


def _is_driven(group: Group) -> bool:
    return all(member.job.is_open for member in group.members)


def grow(tentative: ElasticGroups) -> None:
    """Widens groups of one job into free GPUs, where that pays for the pause."""
    tried: set[int] = set()
    while tentative.free.num:
        found = [
            (saved_s, group, size)
            for group in tentative.groups.values()
            if group.number not in tried | tentative.rules.held and not tentative.is_reserved(group)
            for saved_s, size in [_best_size(tentative, group)]
            if size
        ]
        if not found:
            return
        _, group, size = max(found, key=lambda one: (one[0], -one[1].number))
        tried.add(group.number)
        larger = _wider(tentative, group, size)
        if larger is not None:
            tentative.accept(larger, (group,))


def _best_size(tentative: ElasticGroups, group: Group) -> tuple[float, int]:
    """Seconds that each further GPU saves at the best number of GPUs; that number, 0 = none."""
    if len(group.members) > 1 or group.members[0].job.is_open:
        return 0.0, 0
    member, num = group.members[0], len(group.gpus)
    left_s = group.last_end_s - max(tentative.now_s, group.ready_s)
    options = [
        (left_s * (1 - member.tokens_per_s / rate) / (size - num), size)
        for size, rate in tentative.sizes(member.job).items()
        if 0 < size - num <= tentative.free.num and rate > member.tokens_per_s
    ]
    return max(options, default=(0.0, 0))


def _wider(tentative: ElasticGroups, group: Group, size: int) -> Proposal | None:
    """The group on more GPUs; None if it does not pay."""
    larger = tentative.wider(group, size)
    if larger is None:
        return None
    pause_s = larger.group.ready_s - max(tentative.now_s, group.ready_s)
    saved_s = group.last_end_s - larger.group.last_end_s
    return larger if saved_s > (PAYS - 1) * pause_s else None


_NEXT_TO_NOTHING = 400
"""The job takes so many times the pause of each member that it joins."""
_AS_FAST = 0.98
"""Share of its speed alone, or before another joins, at which a job counts as not slowed."""
_MOST_MIXES = 4
"""Mixes of jobs that a decision looks at; the model takes milliseconds for one it does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic(NetBenefit):
    """Lets the shortest work have the GPUs it uses best, by every move that there is.

    A decision starts jobs on free GPUs, or beside clients' jobs, which cost nothing while their
    clients think. Then small jobs, whose batch lies below the knee of a round's time, are fused
    with running ones where that pays, as `tlora_best` does; long jobs make room for short ones;
    those that still wait are fused; urgent ones oust less urgent ones. GPUs that are left go to
    fused jobs that slow each other, and to groups that train faster with them. Each move has to
    save more than its pauses, and keeps every bound but those of jobs that are ousted.
    """

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Starts, pauses, shrinks, fuses and widens groups; implements `Policy.decide`."""
        tentative = ElasticGroups(
            now_s, cluster, self.speeds, self.rules, jobs.paused(), most_mixes=_MOST_MIXES
        )
        order = self._all_in_order(tentative, jobs)
        left = _start(tentative, order, changes)
        left = join_clients(tentative, left)
        hosts = Hosts(tentative, changes, left, len(jobs))
        left = self._fuse(tentative, hosts, [w for w in left if tentative.is_small(w)], left)
        left = make_room(tentative, left)
        left = self._fuse(tentative, hosts, left, left)
        oust(tentative, left)
        separate(
            tentative,
            lambda g: tentative.may_move(g) and not tentative.is_below_knee(g.kinds, len(g.gpus)),
        )
        grow(tentative)
        return tentative.decisions()

    def _fuse(
        self, tentative: ElasticGroups, hosts: Hosts, some: list[Waiting], left: list[Waiting]
    ) -> list[Waiting]:
        """Lets some of the jobs that are left join groups where that pays; returns the rest."""
        hosts.left = some
        if self.rules.use_residual and some:
            self._merge(tentative, hosts)
        return [waiting for waiting in left if not tentative.has_placed(waiting)]

    def _all_in_order(self, tentative: ElasticGroups, jobs: WaitingQueue) -> list[Waiting]:
        """The jobs to look at: the shortest first; before an overdue one come all paused jobs."""
        lookahead, may_run = self.rules.lookahead, tentative.may_run
        overdue = jobs.overdue(tentative.now_s, lookahead, may_run)
        overdue = [waiting for waiting in overdue if waiting.pause is None]
        first = {waiting.job.index for waiting in overdue}
        others = {w.job.index: w for w in jobs.by_size(lookahead, may_run)}
        others |= {w.job.index: w for w in jobs.paused()}
        rest = [waiting for index, waiting in others.items() if index not in first]
        rest.sort(key=lambda w: (-w.job.priority, tentative.least_s(w), w.job.index))
        if not overdue:
            return rest
        back = [waiting for waiting in rest if waiting.pause is not None]
        return [*back, *overdue, *(waiting for waiting in rest if waiting.pause is None)]


def _start(tentative: ElasticGroups, order: list[Waiting], changes: Changes) -> list[Waiting]:
    """Starts jobs on free GPUs, in order, and returns those that still wait.

    A job that does not fit lets the next ones pass; nodes are reserved for an overdue one.
    """
    left: list[Waiting] = []
    refused: set[tuple[int, int]] = set()
    for place, waiting in enumerate(order):
        job, is_paused = waiting.job, waiting.pause is not None
        is_overdue = not is_paused and job.due_s <= tentative.now_s
        kind = (job.kind, job.num_gpus)
        if found := _beside_small(tentative, waiting):
            tentative.accept(found[1], (found[0],))
            continue
        proposal = None
        if changes.freed or job.index in changes.arrived or is_overdue:
            if tentative.free.num and (is_paused or kind not in refused):
                proposal = _placed(tentative, waiting, len(order) - 1 - place)
            proposal = proposal or tentative.on_reserved_gpus(waiting)
        if proposal is not None:
            tentative.accept(proposal)
            continue
        if is_overdue and not make_room(tentative, [waiting]):
            continue
        left.append(waiting)
        if not is_paused and tentative.within_quota(waiting):
            refused.add(kind)
            if is_overdue:
                tentative.reserve(job.num_gpus)
    return left


def _beside_small(tentative: ElasticGroups, waiting: Waiting) -> tuple[Group, Proposal] | None:
    """The fullest group that the job joins instead of free GPUs, as it slows nobody there.

    The group is there no longer for it, and stands still for next to nothing of the job's time.
    """
    if (
        not tentative.free.num
        or not tentative.rules.use_residual
        or not tentative.is_small(waiting)
    ):
        return None
    job, admit_s = waiting.job, _NEXT_TO_NOTHING * tentative.rules.cost.admit_s
    fitting = [
        group
        for group in tentative.groups.values()
        if tentative.has_room(group, waiting)
        and not any(member.job.is_open for member in group.members)
        and admit_s * len(group.members) <= waiting.isolated_left_s
        and tentative.now_s + waiting.isolated_left_s <= group.last_end_s
        and tentative.is_below_knee((*group.kinds, job.kind), len(group.gpus))
    ]
    fitting.sort(key=lambda group: (-len(group.members) / len(group.gpus), group.number))
    for group in fitting[:MOST_SIZES]:
        if not (proposal := tentative.with_joining(group, waiting)):
            continue
        before = {member.job.index: member.tokens_per_s for member in group.members}
        before[job.index] = job.isolated_tokens_per_s
        members = proposal.group.members
        if all(m.tokens_per_s >= _AS_FAST * before[m.job.index] for m in members):
            return group, proposal
    return None


def _placed(tentative: ElasticGroups, waiting: Waiting, num_behind: int) -> Proposal | None:
    """The job back on its GPUs if it was paused and they are free, else on the best free ones."""
    home = tentative.back_home(waiting)
    if home is not None:
        return home
    for size in tentative.by_cost(waiting, max(0, num_behind - tentative.free.num)):
        if size <= tentative.free.num and (proposal := tentative.alone(waiting, size)):
            return proposal
    return None
