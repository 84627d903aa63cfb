"""Lets jobs join groups that only clients drive: there they slow no other job down."""

from __future__ import annotations

from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policies.elastic.sizes import Sizes
from tlora_megatron.scheduler.policies.merge_benefit import list_schedule
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups


def join_clients(tentative: TentativeGroups, order: list[Waiting], sizes: Sizes) -> list[Waiting]:
    """Starts jobs beside clients' where they end no later than by waiting; returns those left."""
    if not any(_is_driven(group) for group in tentative.groups.values()):
        return order
    starts_s = list_schedule(tentative, order)
    left = []
    for waiting in order:
        by_s = starts_s[waiting.job.index] + sizes.least_s(waiting)
        found = None if waiting.pause or waiting.job.is_open else _beside(tentative, waiting, by_s)
        if found is None:
            left.append(waiting)
        else:
            tentative.accept(found[1], (found[0],))
    return left


def _beside(
    tentative: TentativeGroups, waiting: Waiting, by_s: float
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
