"""Whom free GPUs go to first: the queue discipline that all policies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.jobs import Waiting
from tlora_megatron.scheduler.policies.tentative_groups import Draft, Proposal
from tlora_megatron.scheduler.queue import WaitingQueue

Choose = Callable[[Draft, Waiting], Proposal | None]
"""On which GPUs a job would start; None where there are none."""


def as_asked(draft: Draft, waiting: Waiting) -> Proposal | None:
    """The job alone on the GPUs it asks for."""
    return draft.alone(waiting, waiting.job.num_gpus)


def start_alone(
    draft: Draft,
    jobs: WaitingQueue,
    cluster: ClusterState,
    others: Sequence[Waiting],
    chooser: Callable[[Sequence[Waiting]], Choose] = lambda order: as_asked,
) -> list[Waiting]:
    """Starts jobs alone on free GPUs, in order; returns those that still wait.

    First come jobs past their due time, the longest first whatever their priority, then `others`.
    A job that does not fit is passed over by the next ones. If it is due, the nodes that can take
    it first are kept for it: nobody starts there who would be in the way, and groups there take
    nobody in. So a job that is due the longest starts no later than what then runs on those nodes
    ends. (Backfilling, as batch schedulers do it.)

    Args:
        draft: is drawn on.
        jobs: all that wait.
        cluster: where no GPUs became free since the last decision, of the jobs that are not due
            only those that no decision has seen are tried: the others cannot start now.
        others: the jobs to look at, in the policy's order; those past their due time may be among
            them.
        chooser: makes the choice of GPUs for these jobs in this order.
    """
    late = jobs.overdue(draft.now_s, draft.rules.lookahead, cluster.may_run)
    first = {waiting.job.index for waiting in late}
    order = [*late, *(waiting for waiting in others if waiting.job.index not in first)]
    choose = chooser(order)
    left: list[Waiting] = []
    refused: set[tuple[int, int]] = set()
    for waiting in order:
        is_late = waiting.job.index in first
        if not (is_late or cluster.freed or waiting.job.index in jobs.arrived):
            left.append(waiting)
            continue
        key = (waiting.job.kind, waiting.job.num_gpus)
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
