"""Makes room for short work that waits: a long job gives it GPUs, or all of them for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tlora_megatron.scheduler.formation import Parts
from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policies.elastic.sizes import Sizes
from tlora_megatron.scheduler.policies.merge_benefit import list_schedule
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups

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

    def take(self, tentative: TentativeGroups) -> None:
        """Shrinks or pauses the group, and starts the job."""
        if self.rest is None:
            tentative.pause(self.group)
        else:
            tentative.accept(self.rest, (self.group,))
        own = tentative.propose(Parts(joining=(self.waiting,)), self.gpus)
        assert own is not None, "room was found for the job"
        tentative.accept(own)


def make_room(tentative: TentativeGroups, order: Sequence[Waiting], sizes: Sizes) -> list[Waiting]:
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
        room = _best(tentative, waiting, wait_s, sizes, len(order) - 1 - place) if may_ask else None
        if room is None:
            left.append(waiting)
        else:
            room.take(tentative)
    return left


def _best(
    tentative: TentativeGroups, waiting: Waiting, wait_s: float, sizes: Sizes, num_behind: int
) -> Room | None:
    best, most_s = None, 0.0
    end_s = wait_s + sizes.least_s(waiting)
    speeds = sizes.of(waiting.job)
    for size in sizes.by_cost(waiting, num_behind)[:_MOST_SIZES]:
        own_s = waiting.tokens_left / speeds[size]
        for group in _givers(tentative, size, own_s) if own_s < end_s else ():
            loss_s, keep = _loss(tentative, group, size, own_s, sizes)
            net_s = end_s - own_s - loss_s
            if net_s > most_s and (room := _room(tentative, waiting, group, size, keep)):
                best, most_s = room, net_s
    return best


def _givers(tentative: TentativeGroups, size: int, for_s: float) -> Iterator[Group]:
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


def _loss(
    tentative: TentativeGroups, group: Group, size: int, for_s: float, sizes: Sizes
) -> tuple[float, int]:
    """Seconds that a group loses, what a move must bring included, and the GPUs it keeps."""
    member, cost = group.members[0], tentative.rules.cost
    pause_s = cost.save_s([member.job]) + cost.pause_s((), group.gpus, [member.job])
    paused_s = for_s + PAYS * pause_s
    rest = len(group.gpus) - size
    keep = 1 << (rest.bit_length() - 1) if rest else 0
    rate = sizes.of(member.job).get(keep)
    if rate is None:
        return paused_s, 0
    slower_s = for_s * (1 - rate / member.tokens_per_s) + (PAYS + 1) * pause_s
    return min((paused_s, 0), (slower_s, keep))


def _room(
    tentative: TentativeGroups, waiting: Waiting, group: Group, size: int, keep: int
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
        if rest is None or end_s > tentative.claims.needed_s(gpus):
            return None
        return Room(group, rest, waiting, gpus)
    pause = tentative.as_paused(group, member).pause
    assert pause is not None, "it is paused there"
    return None if end_s > pause.back_by_s else Room(group, None, waiting, gpus)
