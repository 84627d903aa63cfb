"""Whom free GPUs go to first: the queue discipline that all policies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.draft import Draft, Proposal
from tlora_megatron.scheduler.jobs import Waiting
from tlora_megatron.scheduler.policy import Rules
from tlora_megatron.scheduler.queue import WaitingQueue


def overdue(now_s: float, jobs: WaitingQueue, cluster: ClusterState, rules: Rules) -> list[Waiting]:
    """Jobs past their due time, longest first, whatever their priority."""
    return jobs.overdue(now_s, rules.lookahead, cluster.may_run)


def in_turn(late: Sequence[Waiting], others: Sequence[Waiting]) -> list[Waiting]:
    """Overdue jobs, then the others in their order."""
    first = {waiting.job.index for waiting in late}
    return [*late, *(waiting for waiting in others if waiting.job.index not in first)]


def as_asked(draft: Draft, waiting: Waiting) -> Proposal | None:
    """The job alone on the GPUs it asks for."""
    return draft.alone(waiting, waiting.job.num_gpus)


def start_alone(
    draft: Draft,
    order: Sequence[Waiting],
    num_late: int,
    choose: Callable[[Draft, Waiting], Proposal | None] = as_asked,
) -> list[Waiting]:
    """Starts jobs alone on free GPUs, in order; returns those that still wait.

    A job that does not fit is passed over by the next ones. If it is due, the nodes that can take
    it first are kept for it: nobody starts there who would be in the way, and groups there take
    nobody in. So a job that is due the longest starts no later than what then runs on those nodes
    ends. (Backfilling, as batch schedulers do it.)

    Args:
        draft: is drawn on.
        order: waiting jobs; the first `num_late` are overdue.
        num_late: how many are.
        choose: on which GPUs a job would start; None where there are none.
    """
    left: list[Waiting] = []
    refused: set[tuple[int, int]] = set()
    for place, waiting in enumerate(order):
        key = (waiting.job.kind, waiting.job.num_gpus)
        is_late = place < num_late
        proposal = None
        if key not in refused and (draft.free.num or is_late):
            proposal = choose(draft, waiting)
            if proposal is None and draft.within_quota(waiting):
                refused.add(key)
                if is_late:
                    draft.reserve(waiting.job.num_gpus)
        if proposal is None:
            proposal = draft.in_the_gap(waiting)
        if proposal is None:
            left.append(waiting)
        else:
            draft.accept(proposal)
    return left
