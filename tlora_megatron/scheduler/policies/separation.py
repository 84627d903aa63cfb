"""Gives free GPUs to running jobs when nothing waits: groups split, and narrow ones grow."""

from __future__ import annotations

from tlora_megatron.scheduler.formation import Parts
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups
from tlora_megatron.scheduler.policy import Rules
from tlora_megatron.scheduler.queue import Group


def separate(tentative: TentativeGroups, rules: Rules) -> None:
    """Moves members of fused groups to free GPUs, the oldest group first, as long as it pays.

    It pays if the parts train more tokens per second than the whole, and the members' end times
    sum to less although the group stands still during the move.
    """
    fused = [group for group in tentative.groups.values() if len(group.members) > 1]
    for group in sorted(fused, key=lambda group: (group.formed_s, group.number)):
        if not tentative.free.num:
            return
        while len(group.members) > 1:
            found = _best_leaver(tentative, group, rules)
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
        free = tentative.free.copy()
        free.give(group.gpus)
        gpus = free.find(asked)
        if gpus is None:
            continue
        larger = tentative.propose(tentative.parts_of(group), gpus, group)
        if larger is not None and _sum_of_ends(larger.group) < _sum_of_ends(group):
            tentative.accept(larger, (group,))


def shrink(tentative: TentativeGroups) -> None:
    """Takes from groups the GPUs that no member asks for, as far as the members' bounds allow.

    A group has such GPUs when the member that started on so many has ended before the others.
    """
    for group in sorted(tentative.groups.values(), key=lambda group: group.number):
        size = max(member.job.num_gpus for member in group.members)
        while size < len(group.gpus):
            smaller = tentative.propose(tentative.parts_of(group), group.gpus[:size], group)
            if smaller is not None:
                tentative.accept(smaller, (group,))
                break
            size *= 2


def _best_leaver(
    tentative: TentativeGroups, group: Group, rules: Rules
) -> tuple[Proposal, Proposal] | None:
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
        if joint > group.tokens_per_s * (1 + rules.min_gain) and saved > most_saved:
            best, most_saved = (rest, own), saved
    return best


def _sum_of_ends(group: Group) -> float:
    return sum(group.end_s(member) for member in group.members)
