"""Gives GPUs that no job waits for to running jobs, the largest saving for each GPU first."""

from __future__ import annotations

from tlora_megatron.scheduler.jobs import Group
from tlora_megatron.scheduler.policies.elastic.room import PAYS
from tlora_megatron.scheduler.policies.elastic.sizes import Sizes
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups


def grow(tentative: TentativeGroups, sizes: Sizes) -> None:
    """Widens groups of one job into free GPUs, where that pays for the pause."""
    tried: set[int] = set()
    while tentative.free.num:
        found = [
            (saved_s, group, size)
            for group in tentative.groups.values()
            if group.number not in tried and not tentative.is_reserved(group)
            for saved_s, size in [_best_size(tentative, group, sizes)]
            if size
        ]
        if not found:
            return
        _, group, size = max(found, key=lambda one: (one[0], -one[1].number))
        tried.add(group.number)
        larger = _wider(tentative, group, size)
        if larger is not None:
            tentative.accept(larger, (group,))


def _best_size(tentative: TentativeGroups, group: Group, sizes: Sizes) -> tuple[float, int]:
    """Seconds that each further GPU saves at the best number of GPUs; that number, 0 = none."""
    if len(group.members) > 1 or group.members[0].job.is_open:
        return 0.0, 0
    member, num = group.members[0], len(group.gpus)
    left_s = group.last_end_s - max(tentative.now_s, group.ready_s)
    options = [
        (left_s * (1 - member.tokens_per_s / rate) / (size - num), size)
        for size, rate in sizes.of(member.job).items()
        if 0 < size - num <= tentative.free.num and rate > member.tokens_per_s
    ]
    return max(options, default=(0.0, 0))


def _wider(tentative: TentativeGroups, group: Group, size: int) -> Proposal | None:
    """The group on more GPUs, its own among those it may get; None if it does not pay."""
    free = tentative.free.copy()
    free.give(group.gpus)
    gpus = free.find(size)
    larger = gpus and tentative.propose(tentative.parts_of(group), gpus, group)
    if not larger:
        return None
    pause_s = larger.group.ready_s - max(tentative.now_s, group.ready_s)
    saved_s = group.last_end_s - larger.group.last_end_s
    return larger if saved_s > (PAYS - 1) * pause_s else None
