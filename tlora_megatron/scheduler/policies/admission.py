"""The queue discipline that all policies share: who gets free GPUs first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups
from tlora_megatron.scheduler.policy import Changes
from tlora_megatron.scheduler.queue import Waiting, WaitingQueue

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
    take it first are reserved for it: no job that would be in its way starts there, and groups
    there take no more jobs. So the longest overdue job starts no later than the groups that run on
    those nodes end. (Batch schedulers call this backfilling.)

    Args:
        tentative: the groups so far; jobs that start are added to it.
        jobs: all waiting jobs.
        cluster: the cluster before this decision.
        changes: what happened since the last decision. If no GPUs became free, a job that is
            neither overdue nor new is skipped: it could not start then and cannot start now.
        others: the jobs to try, in the policy's order; may include overdue ones.
        chooser: called once with all jobs in order; returns the function that chooses GPUs.
    """
    overdue = jobs.overdue(tentative.now_s, tentative.rules.lookahead, cluster.may_run)
    first = {waiting.job.index for waiting in overdue}
    order = [*overdue, *(waiting for waiting in others if waiting.job.index not in first)]
    admission = _Admission(tentative, chooser(order))
    left: list[Waiting] = []
    for waiting in order:
        is_overdue = waiting.job.index in first
        may_start = is_overdue or changes.freed or waiting.job.index in changes.arrived
        if not (may_start and admission.start(waiting, is_overdue=is_overdue)):
            left.append(waiting)
    return left


class _Admission:
    """Starts jobs one by one and remembers which kinds of jobs found no GPUs."""

    def __init__(self, tentative: TentativeGroups, choose: Choose) -> None:
        self._tentative = tentative
        self._choose = choose
        self._refused: set[tuple[int, int]] = set()

    def start(self, waiting: Waiting, *, is_overdue: bool) -> bool:
        """Starts the job if there are GPUs for it; returns whether it started."""
        proposal = self._on_free_gpus(waiting, is_overdue=is_overdue)
        proposal = proposal or self._tentative.on_reserved_gpus(waiting)
        if proposal is None:
            return False
        self._tentative.accept(proposal)
        return True

    def _on_free_gpus(self, waiting: Waiting, *, is_overdue: bool) -> Proposal | None:
        """A start on unreserved GPUs; reserves nodes for an overdue job that finds none."""
        key = (waiting.job.kind, waiting.job.num_gpus)
        if key in self._refused or not (self._tentative.free.num or is_overdue):
            return None
        proposal = self._choose(self._tentative, waiting)
        if proposal is None and self._tentative.within_quota(waiting):
            self._refused.add(key)
            if is_overdue:
                self._tentative.reserve(waiting.job.num_gpus)
        return proposal
