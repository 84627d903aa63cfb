"""Room that long jobs make for short ones that wait, and less urgent jobs for urgent ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tlora_megatron.scheduler.fleet import Parts
from tlora_megatron.scheduler.group_throughput import Kinds
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups
from tlora_megatron.scheduler.policies.tlora import EXPECTED, list_schedule
from tlora_megatron.scheduler.queue import Group, Job, Waiting


class ElasticGroups(TentativeGroups):
    """Groups as a decision would leave them, and the numbers of GPUs that suit single jobs."""

    def sizes(self, job: Job) -> Mapping[int, float]:
        """Numbers of GPUs worth holding, with speeds; of a driven job what it asks for."""
        found = {} if job.is_open else self.speeds.sizes(job.kind, self.shape.num_gpus)
        return found or {job.num_gpus: job.isolated_tokens_per_s}

    def is_below_knee(self, kinds: Kinds, num_gpus: int, share: float = 0.95) -> bool:
        """True if a round of these jobs takes hardly longer than one of few tokens.

        It may hold that share of the knee's tokens: the planner errs by 5 %.
        """
        tokens = sum(self.speeds.load_of(kind).batch_tokens for kind in kinds)
        return tokens < share * self.speeds.knee(kinds[0], num_gpus)

    def is_small(self, waiting: Waiting) -> bool:
        """True if the job is fused with others rather than that others are paused for it."""
        return not waiting.job.is_open and self.is_below_knee((waiting.job.kind,), 1, _SMALL)

    @cached_property
    def singles(self) -> Mapping[int, Sequence[tuple[Group, float]]]:
        """For each node the groups of one job on it as they ran, and what pausing one costs it."""
        nodes: dict[int, list[tuple[Group, float]]] = {n: [] for n in range(self.shape.num_nodes)}
        for group in sorted(self.groups.values(), key=lambda g: (-len(g.gpus), -g.last_end_s)):
            if len(group.members) == 1 and self.shape.tier(group.gpus) == 0:
                node = group.gpus[0] // self.shape.gpus_per_node
                nodes[node].append((group, _pause_s(self, group)))
        return nodes

    def has_room(self, host: Group, waiting: Waiting) -> bool:
        """A cheap test that rules out hosts, above all those wider than any of the jobs asks for.

        Such a group could not give back what it has grown by: only groups of one job shrink.
        """
        num = len(host.gpus)
        asked = num <= waiting.job.num_gpus or any(m.job.num_gpus >= num for m in host.members)
        return asked and super().has_room(host, waiting)

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


PAYS = 3.0
"""A move must save so many times the pauses that it costs."""
_MOST_TRIED = 12
"""Waiting jobs for which a decision looks for room."""
MOST_SIZES = 3
"""Numbers of GPUs that are tried for each."""
_SMALL = 1.5
"""A job is small up to so many times the knee's tokens: beyond it none is fused for nothing."""


@dataclass(frozen=True, slots=True)
class Room:
    """GPUs that running groups give to a waiting job."""

    groups: tuple[Group, ...]
    rest: Proposal | None
    """The only group on the GPUs that it keeps; None = all their jobs are paused."""
    waiting: Waiting
    gpus: tuple[int, ...]

    def take(self, tentative: ElasticGroups) -> None:
        """Shrinks or pauses the groups, and starts the job."""
        if self.rest is not None:
            tentative.accept(self.rest, self.groups)
        else:
            list(map(tentative.pause, self.groups))
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
    for size in tentative.by_cost(waiting, num_behind)[:MOST_SIZES]:
        own_s = waiting.tokens_left / speeds[size]
        for group in _givers(tentative, waiting, size, own_s) if own_s < end_s else ():
            loss_s, keep = _loss(tentative, group, size, own_s)
            net_s = end_s - own_s - loss_s
            gpus = group.gpus[-size:] if keep else group.gpus[:size]
            if net_s > most_s and (room := _room(tentative, waiting, (group,), gpus, keep)):
                best, most_s = room, net_s
        if own_s < end_s and best is None and size > 1:
            best, most_s = _of_nodes(tentative, waiting, size, own_s, end_s - own_s)
    return best


def _of_nodes(
    tentative: ElasticGroups, waiting: Waiting, size: int, own_s: float, gain_s: float
) -> tuple[Room | None, float]:
    """The room that groups give together on as few nodes as can be, and the seconds it brings."""
    per_node, now_s, found = tentative.shape.gpus_per_node, tentative.now_s, []
    for node, singles in tentative.singles.items():
        gpus, paused, loss_s = list(tentative.free.in_node(node)), [], 0.0
        for group, pause_s in singles:
            if len(gpus) >= min(size, per_node) or loss_s >= gain_s:
                break
            if (
                group.last_end_s - now_s > own_s
                and group.members[0].job.priority <= waiting.job.priority
                and tentative.groups.get(group.number) is group
            ):
                loss_s += own_s + PAYS * pause_s
                gpus += group.gpus
                paused.append(group)
        if len(gpus) >= min(size, per_node) and all(map(tentative.may_move, paused)):
            found.append((loss_s, node, gpus[-min(size, per_node) :], paused))
    num_nodes = -(-size // per_node)
    found.sort(key=lambda own: own[:2])
    for first in range(len(found) + 1 - num_nodes):
        chosen = found[first : first + num_nodes]
        net_s = gain_s - sum(own[0] for own in chosen)
        groups = tuple(group for own in chosen for group in own[3])
        gpus = sorted([gpu for own in chosen for gpu in own[2]][-size:])
        if groups and net_s > 0 and (room := _room(tentative, waiting, groups, tuple(gpus))):
            return room, net_s
    return None, 0.0


def _givers(tentative: ElasticGroups, waiting: Waiting, size: int, for_s: float) -> Iterator[Group]:
    """Groups of one job, no more urgent, with so many GPUs at least and longer to train."""
    for group in tentative.groups.values():
        if (
            len(group.gpus) >= size
            and len(group.members) == 1
            and group.members[0].job.priority <= waiting.job.priority
            and group.last_end_s - tentative.now_s > for_s
            and tentative.may_move(group)
        ):
            yield group


def _loss(tentative: ElasticGroups, group: Group, size: int, for_s: float) -> tuple[float, int]:
    """Seconds that a group loses, what a move must bring included, and the GPUs it keeps."""
    member, pause_s = group.members[0], _pause_s(tentative, group)
    paused_s = for_s + PAYS * pause_s
    rest = len(group.gpus) - size
    keep = 1 << (rest.bit_length() - 1) if rest else 0
    rate = tentative.sizes(member.job).get(keep)
    if rate is None:
        return paused_s, 0
    slower_s = for_s * (1 - rate / member.tokens_per_s) + (PAYS + 1) * pause_s
    return min((paused_s, 0), (slower_s, keep))


def _pause_s(tentative: ElasticGroups, group: Group) -> float:
    jobs, cost = [group.members[0].job], tentative.rules.cost
    return cost.save_s(jobs) + cost.pause_s((), group.gpus, jobs)


def _room(
    tentative: ElasticGroups,
    waiting: Waiting,
    groups: tuple[Group, ...],
    gpus: tuple[int, ...],
    keep: int = 0,
) -> Room | None:
    """The room that groups of one job each give; None if a bound or a paused job forbids it."""
    own = tentative.propose(Parts(joining=(waiting,)), gpus)
    if own is None:
        return None
    doubt, now_s = tentative.speeds.doubt, tentative.now_s
    end_s = own.group.last_end_s + 1e-6  # sums differ by order
    end_s += max(tentative.rules.cost.save_s([group.members[0].job]) for group in groups)
    end_s += doubt((waiting.job.kind,), len(gpus)) * (own.group.last_end_s - now_s)
    if end_s > tentative.needed_s(gpus):
        return None
    if keep:
        rest = tentative.propose(Parts.of(groups[0]), groups[0].gpus[:keep], groups[0])
        return None if rest is None else Room(groups, rest, waiting, gpus)
    for group in groups:
        late_s = doubt(group.kinds, len(group.gpus)) * (group.last_end_s - now_s)
        if end_s + late_s > min(p.back_by_s for p in tentative.pauses_of(group).values()):
            return None
    return Room(groups, None, waiting, gpus)


def oust(tentative: ElasticGroups, order: Sequence[Waiting]) -> None:
    """Starts jobs on GPUs of groups whose jobs are all less urgent, and which are paused for it.

    Neither bounds nor claims nor reservations of less urgent jobs stand in the way.
    """
    levels = {min(m.job.priority for m in group.members) for group in tentative.groups.values()}
    urgent = [w for w in order if w.job.priority > min(levels, default=math.inf)]
    for waiting in urgent[:_MOST_TRIED]:
        if not waiting.job.is_open and tentative.within_quota(waiting):
            tentative.unreserve()
            _oust_for(tentative, waiting)


def _oust_for(tentative: ElasticGroups, waiting: Waiting) -> None:
    givers = [
        group
        for group in tentative.groups.values()
        if max(m.job.priority for m in group.members) < waiting.job.priority
        and tentative.may_move(group, urgent=True)
    ]
    givers.sort(key=lambda g: (max(m.job.priority for m in g.members), -g.last_end_s, g.number))
    for size in tentative.by_cost(waiting, 0):
        free, taken = tentative.free.copy(), 0
        while (gpus := free.find(size)) is None and taken < len(givers):
            free.give(givers[taken].gpus)
            taken += 1
        own = None if gpus is None else tentative.propose(Parts(joining=(waiting,)), gpus)
        if gpus is None or own is None:
            continue
        for group in givers[:taken]:
            if not set(group.gpus).isdisjoint(gpus):
                tentative.pause(group)
        again = tentative.propose(own.parts, gpus)  # after the others' states are saved
        assert again is not None, "room was made for the job"
        tentative.accept(again)
        return
