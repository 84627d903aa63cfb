"""When nothing waits, free GPUs go to running jobs: groups split, and get back GPUs they lack."""

from __future__ import annotations

from tlora_megatron.scheduler.formation import Parts
from tlora_megatron.scheduler.jobs import Group
from tlora_megatron.scheduler.policies.tentative_groups import Draft, Proposal
from tlora_megatron.scheduler.policy import Rules


def separate(draft: Draft, rules: Rules) -> None:
    """Moves members of fused groups, the slowest first, to free GPUs as long as it pays.

    It pays where the parts train more tokens per second than the whole, and all members together
    end earlier although the group stands still for the move.
    """
    fused = [group for group in draft.groups.values() if len(group.members) > 1]
    for group in sorted(fused, key=lambda group: (group.formed_s, group.number)):
        if not draft.free.num:
            return
        while len(group.members) > 1:
            found = _best_leaver(draft, group, rules)
            if found is None:
                break
            rest, own = found
            group = draft.accept(rest, (group,))
            draft.accept(own)


def grow(draft: Draft) -> None:
    """Gives groups that run on fewer GPUs than a member asks for as many, where all end earlier."""
    for group in sorted(draft.groups.values(), key=lambda group: group.number):
        asked = max(member.job.num_gpus for member in group.members)
        if not draft.free.num or asked <= len(group.gpus):
            continue
        free = draft.free.copy()
        free.give(group.gpus)
        gpus = free.find(asked)
        if gpus is None:
            continue
        larger = draft.propose(draft.parts_of(group), gpus, group)
        if larger is not None and _sum_of_ends(larger.group) < _sum_of_ends(group):
            draft.accept(larger, (group,))


def _best_leaver(draft: Draft, group: Group, rules: Rules) -> tuple[Proposal, Proposal] | None:
    """The member whose leaving ends all members earliest: the rest, and the member alone."""
    parts = draft.parts_of(group)
    best, most_saved = None, 0.0
    for place, (_, member) in enumerate(parts.running):
        gpus = draft.free.find(member.job.num_gpus)
        if gpus is None:
            continue
        others = parts.running[:place] + parts.running[place + 1 :]
        rest = draft.propose(Parts(running=others, joining=parts.joining), group.gpus, group)
        own = draft.propose(Parts(running=(parts.running[place],)), gpus)
        if rest is None or own is None:
            continue
        joint = rest.group.tokens_per_s + own.group.tokens_per_s
        saved = _sum_of_ends(group) - _sum_of_ends(rest.group) - _sum_of_ends(own.group)
        if joint > group.tokens_per_s * (1 + rules.min_gain) and saved > most_saved:
            best, most_saved = (rest, own), saved
    return best


def _sum_of_ends(group: Group) -> float:
    return sum(group.end_s(member) for member in group.members)
