"""The queue discipline that all policies share: who gets free GPUs first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tlora_megatron.scheduler.fleet import Parts
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups
from tlora_megatron.scheduler.policy import Changes, ClusterState, Rules
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue

Choose = Callable[[TentativeGroups, Waiting], Proposal | None]
"""Chooses the GPUs on which a job would start; None if there are none for it."""


def as_asked(tentative: TentativeGroups, waiting: Waiting) -> Proposal | None:
    """Proposes to start the job alone on as many GPUs as it asks for."""
    return tentative.alone(waiting, waiting.job.num_gpus)


def start_alone(
    tentative: TentativeGroups,
    jobs: WaitingQueue,
    cluster: ClusterState,
    changes: Changes,
    others: Sequence[Waiting],
    chooser: Callable[[Sequence[Waiting]], Choose] = lambda order: as_asked,
) -> list[Waiting]:
    """Starts jobs alone on free GPUs, in order, and returns those that still wait.

    Overdue jobs come first, the longest overdue at the front whatever their priority; then come
    `others`. A job that does not fit lets the next ones pass. If it is overdue, the nodes that can
    take it first are reserved for it (backfilling): no job that would be in its way starts there.

    Args:
        changes: if no GPUs became free, a job that is neither overdue nor new is skipped.
        others: the jobs to try, in the policy's order; may include overdue ones.
        chooser: called once with all jobs in order; returns the function that chooses GPUs.
    """
    overdue = jobs.overdue(tentative.now_s, tentative.rules.lookahead, cluster.may_run)
    first = {waiting.job.index for waiting in overdue}
    order = [*overdue, *(waiting for waiting in others if waiting.job.index not in first)]
    choose, refused = chooser(order), set[tuple[int, int]]()
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
    """Takes from groups the GPUs that no member asks for any more, as far as bounds allow."""
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
