"""The policy `tlora_elastic`: groups grow into idle GPUs, and shrink or pause when others wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tlora_megatron.scheduler.fleet import Parts
from tlora_megatron.scheduler.policies.tentative_groups import Hosts, Proposal, TentativeGroups
from tlora_megatron.scheduler.policies.tlora import EXPECTED, NetBenefit, list_schedule
from tlora_megatron.scheduler.policy import Changes, ClusterState, Decision
from tlora_megatron.scheduler.queue import Group, Job, Waiting, WaitingQueue


class ElasticGroups(TentativeGroups):
    """Groups as a decision would leave them, and the numbers of GPUs that suit single jobs."""

    def sizes(self, job: Job) -> Mapping[int, float]:
        """Numbers of GPUs worth holding, with speeds; of a driven job what it asks for."""
        found = {} if job.is_open else self.speeds.sizes(job.kind, self.shape.num_gpus)
        return found or {job.num_gpus: job.isolated_tokens_per_s}

    def least_s(self, waiting: Waiting) -> float:
        """Time that the remaining work takes where the job is fastest; 0 if its client waits."""
        if waiting.job.is_open:
            return 0.0
        return waiting.tokens_left / max(self.sizes(waiting.job).values())

    def by_cost(self, waiting: Waiting, num_waiting: int) -> list[int]:
        """Numbers of GPUs, the best first: the job's own time, and what it delays."""
        share = (num_waiting + EXPECTED) / self.shape.num_gpus
        found = self.sizes(waiting.job)
        return sorted(found, key=lambda g: (waiting.tokens_left / found[g] * (1 + share * g), g))


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


PAYS = 3.0
"""A move must save so many times the pauses that it costs."""
_MOST_TRIED = 12
"""Waiting jobs for which a decision looks for room."""
_MOST_SIZES = 3
"""Numbers of GPUs that are tried for each."""

_ROUNDING_S = 1e-6
"""The sum of the same times may be another in another order."""


@dataclass(frozen=True, slots=True)
class Room:
    """GPUs that a running group gives to a waiting job."""

    group: Group
    rest: Proposal | None
    """The group on the GPUs that it keeps; None = its job is paused."""
    waiting: Waiting
    gpus: tuple[int, ...]

    def take(self, tentative: ElasticGroups) -> None:
        """Shrinks or pauses the group, and starts the job."""
        if self.rest is None:
            tentative.pause(self.group)
        else:
            tentative.accept(self.rest, (self.group,))
        own = tentative.propose(Parts(joining=(self.waiting,)), self.gpus)
        assert own is not None, "room was found for the job"
        tentative.accept(own)


def make_room(tentative: ElasticGroups, order: Sequence[Waiting]) -> list[Waiting]:
    """Starts waiting jobs on GPUs of groups that have longer to train; returns those still left.

    A job gains what it would wait; the group loses its GPUs for as long as the job trains, and two
    pauses. The best of all groups gives them, if the gain is greater. Paused jobs do not ask for
    room: their GPUs are kept for them. Jobs that clients drive neither ask nor give: how
    long they would train is unknown.
    """
    starts_s = list_schedule(tentative, order)
    left, tried = [], 0
    for place, waiting in enumerate(order):
        may_ask = (
            tried < _MOST_TRIED
            and waiting.pause is None
            and not waiting.job.is_open
            and tentative.within_quota(waiting)
        )
        tried += may_ask
        wait_s = starts_s[waiting.job.index] - tentative.now_s
        room = _best(tentative, waiting, wait_s, len(order) - 1 - place) if may_ask else None
        if room is None:
            left.append(waiting)
        else:
            room.take(tentative)
    return left


def _best(
    tentative: ElasticGroups, waiting: Waiting, wait_s: float, num_behind: int
) -> Room | None:
    best, most_s = None, 0.0
    end_s = wait_s + tentative.least_s(waiting)
    speeds = tentative.sizes(waiting.job)
    for size in tentative.by_cost(waiting, num_behind)[:_MOST_SIZES]:
        own_s = waiting.tokens_left / speeds[size]
        for group in _givers(tentative, size, own_s) if own_s < end_s else ():
            loss_s, keep = _loss(tentative, group, size, own_s)
            net_s = end_s - own_s - loss_s
            if net_s > most_s and (room := _room(tentative, waiting, group, size, keep)):
                best, most_s = room, net_s
    return best


def _givers(tentative: ElasticGroups, size: int, for_s: float) -> Iterator[Group]:
    """Groups of one job with so many GPUs at least and longer to train."""
    for group in tentative.groups.values():
        if (
            len(group.gpus) >= size
            and len(group.members) == 1
            and not group.members[0].job.is_open
            and group.last_end_s - tentative.now_s > for_s
            and not tentative.is_changed(group)
            and not tentative.is_reserved(group)
        ):
            yield group


def _loss(tentative: ElasticGroups, group: Group, size: int, for_s: float) -> tuple[float, int]:
    """Seconds that a group loses, what a move must bring included, and the GPUs it keeps."""
    member, cost = group.members[0], tentative.rules.cost
    pause_s = cost.save_s([member.job]) + cost.pause_s((), group.gpus, [member.job])
    paused_s = for_s + PAYS * pause_s
    rest = len(group.gpus) - size
    keep = 1 << (rest.bit_length() - 1) if rest else 0
    rate = tentative.sizes(member.job).get(keep)
    if rate is None:
        return paused_s, 0
    slower_s = for_s * (1 - rate / member.tokens_per_s) + (PAYS + 1) * pause_s
    return min((paused_s, 0), (slower_s, keep))


def _room(
    tentative: ElasticGroups, waiting: Waiting, group: Group, size: int, keep: int
) -> Room | None:
    """The room that a group gives; None if a bound or a paused job forbids it."""
    rest = None
    gpus = group.gpus[-size:] if keep else group.gpus[:size]
    own = tentative.propose(Parts(joining=(waiting,)), gpus)
    if own is None:
        return None
    member = group.members[0]
    end_s = own.group.last_end_s + tentative.rules.cost.save_s([member.job]) + _ROUNDING_S
    if keep:
        rest = tentative.propose(tentative.parts_of(group), group.gpus[:keep], group)
        if rest is None or end_s > tentative.needed_s(gpus):
            return None
        return Room(group, rest, waiting, gpus)
    back_by_s = tentative.pause_of(group, member).back_by_s
    return None if end_s > back_by_s else Room(group, None, waiting, gpus)


def grow(tentative: ElasticGroups) -> None:
    """Widens groups of one job into free GPUs, where that pays for the pause."""
    tried: set[int] = set()
    while tentative.free.num:
        found = [
            (saved_s, group, size)
            for group in tentative.groups.values()
            if group.number not in tried and not tentative.is_reserved(group)
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


_MOST_MIXES = 4
"""Mixes of jobs that a decision looks at; the model takes milliseconds for one it does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic(NetBenefit):
    """Lets the shortest work have the GPUs it uses best, by every move that there is.

    A decision starts jobs on free GPUs, or beside clients' jobs, which cost nothing while their
    clients think; then long jobs make room for short ones; then the jobs
    that still wait are fused with running ones where that pays, as `tlora_best` does; and GPUs
    that are left go to groups that train faster with them. Each move has to save more than its
    pauses, and keeps every bound.
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
        left = make_room(tentative, left)
        fresh = [waiting for waiting in left if waiting.pause is None]
        if self.rules.use_residual and fresh:
            self._merge(tentative, Hosts(tentative, changes, fresh, len(jobs)))
        grow(tentative)
        return tentative.decisions()

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
        proposal = None
        if changes.freed or job.index in changes.arrived or is_overdue:
            if tentative.free.num and (is_paused or kind not in refused):
                proposal = _placed(tentative, waiting, len(order) - 1 - place)
            proposal = proposal or tentative.on_reserved_gpus(waiting)
        if proposal is not None:
            tentative.accept(proposal)
            continue
        left.append(waiting)
        if not is_paused and tentative.within_quota(waiting):
            refused.add(kind)
            if is_overdue:
                tentative.reserve(job.num_gpus)
    return left


def _placed(tentative: ElasticGroups, waiting: Waiting, num_behind: int) -> Proposal | None:
    """The job back on its GPUs if it was paused and they are free, else on the best free ones."""
    home = tentative.back_home(waiting)
    if home is not None:
        return home
    for size in tentative.by_cost(waiting, max(0, num_behind - tentative.free.num)):
        if size <= tentative.free.num and (proposal := tentative.alone(waiting, size)):
            return proposal
    return None
