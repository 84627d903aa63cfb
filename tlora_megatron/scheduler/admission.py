"""Whom free GPUs go to first: the queue discipline that all policies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.draft import Draft, Proposal
from tlora_megatron.scheduler.jobs import Waiting
from tlora_megatron.scheduler.policy import Rules
from tlora_megatron.scheduler.queue import WaitingQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The waiting jobs that a decision looks at, in the order in which they may start."""

    order: list[Waiting]
    num_late: int
    """The first so many are past their due time."""


def turn(
    now_s: float,
    jobs: WaitingQueue,
    cluster: ClusterState,
    rules: Rules,
    others: Sequence[Waiting],
) -> Turn:
    """Jobs past their due time, the longest first whatever their priority, then `others`."""
    late = jobs.overdue(now_s, rules.lookahead, cluster.may_run)
    if not late:
        return Turn(order=list(others), num_late=0)
    first = {waiting.job.index for waiting in late}
    rest = [waiting for waiting in others if waiting.job.index not in first]
    return Turn(order=[*late, *rest], num_late=len(late))


def unseen(jobs: WaitingQueue, cluster: ClusterState) -> Set[int] | None:
    """Jobs to try on free GPUs: those no decision has seen, or all (None) if GPUs were freed."""
    return None if cluster.freed else jobs.arrived


def as_asked(draft: Draft, waiting: Waiting) -> Proposal | None:
    """The job alone on the GPUs it asks for."""
    return draft.alone(waiting, waiting.job.num_gpus)


def start_alone(
    draft: Draft,
    turn: Turn,
    only: Set[int] | None = None,
    choose: Callable[[Draft, Waiting], Proposal | None] = as_asked,
) -> list[Waiting]:
    """Starts jobs alone on free GPUs, in order; returns those that still wait.

    A job that does not fit is passed over by the next ones. If it is due, the nodes that can take
    it first are kept for it: nobody starts there who would be in the way, and groups there take
    nobody in. So a job that is due the longest starts no later than what then runs on those nodes
    ends. (Backfilling, as batch schedulers do it.)

    Args:
        draft: is drawn on.
        turn: jobs in order.
        only: of those that are not due only these indices are tried; None = all. Where no GPUs
            became free since the last decision, jobs it has seen cannot start now.
        choose: on which GPUs a job would start; None where there are none.
    """
    left: list[Waiting] = []
    refused: set[tuple[int, int]] = set()
    for place, waiting in enumerate(turn.order):
        is_late = place < turn.num_late
        if not is_late and only is not None and waiting.job.index not in only:
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
