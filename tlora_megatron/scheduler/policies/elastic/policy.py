"""The policy `tlora_elastic`: groups grow into idle GPUs, and shrink or pause when others wait."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.jobs import Waiting
from tlora_megatron.scheduler.policies.elastic.clients import join_clients
from tlora_megatron.scheduler.policies.elastic.growth import grow
from tlora_megatron.scheduler.policies.elastic.room import make_room
from tlora_megatron.scheduler.policies.elastic.sizes import Sizes
from tlora_megatron.scheduler.policies.hosts import Hosts
from tlora_megatron.scheduler.policies.tentative_groups import Proposal, TentativeGroups
from tlora_megatron.scheduler.policies.tlora_best import NetBenefit
from tlora_megatron.scheduler.policy import Changes, Decision
from tlora_megatron.scheduler.queue import WaitingQueue

_MOST_MIXES = 4
"""Mixes of jobs that a decision looks at; the model takes milliseconds for one it does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic(NetBenefit):
    """Lets the shortest work have the GPUs it uses best, by every move that there is.

    A decision starts jobs on free GPUs, or beside clients' jobs, which cost nothing while their
    clients think; then long jobs make room for short ones; then the jobs
    that still wait are fused with running ones where that pays, as `tlora_best` does; and GPUs
    that are left go to groups that train faster with them. Each move has to save more than its
    pauses, and keeps every bound.
    """

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Starts, pauses, shrinks, fuses and widens groups; implements `Policy.decide`."""
        tentative = TentativeGroups(
            now_s, cluster, self.speeds, self.rules, jobs.paused(), most_mixes=_MOST_MIXES
        )
        sizes = Sizes(self.speeds, cluster.shape.num_gpus)
        order = self._order(now_s, jobs, cluster, sizes)
        left = _start(tentative, order, sizes, changes)
        left = join_clients(tentative, left, sizes)
        left = make_room(tentative, left, sizes)
        fresh = [waiting for waiting in left if waiting.pause is None]
        if self.rules.use_residual and fresh:
            self._merge(tentative, fresh, Hosts(tentative, changes), len(jobs))
        grow(tentative, sizes)
        return tentative.decisions()

    def _order(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, sizes: Sizes
    ) -> list[Waiting]:
        """The jobs to look at: the shortest first, unless one is overdue.

        Then all paused jobs come before it: they must not find their GPUs reserved for it, and
        they have trained already, so that being overdue no longer says anything about them.
        """
        lookahead = self.rules.lookahead
        overdue = jobs.overdue(now_s, lookahead, cluster.may_run)
        overdue = [waiting for waiting in overdue if waiting.pause is None]
        first = {waiting.job.index for waiting in overdue}
        others = {w.job.index: w for w in jobs.by_size(lookahead, cluster.may_run)}
        others |= {w.job.index: w for w in jobs.paused()}
        rest = [waiting for index, waiting in others.items() if index not in first]
        rest.sort(key=lambda w: (-w.job.priority, sizes.least_s(w), w.job.index))
        if not overdue:
            return rest
        back = [waiting for waiting in rest if waiting.pause is not None]
        return [*back, *overdue, *(waiting for waiting in rest if waiting.pause is None)]


def _start(
    tentative: TentativeGroups, order: list[Waiting], sizes: Sizes, changes: Changes
) -> list[Waiting]:
    """Starts jobs on free GPUs, in order, and returns those that still wait.

    A job that does not fit lets the next ones pass; nodes are reserved for an overdue one.
    """
    left: list[Waiting] = []
    refused: set[tuple[int, int]] = set()
    for place, waiting in enumerate(order):
        job, is_paused = waiting.job, waiting.pause is not None
        is_overdue = not is_paused and job.due_s <= tentative.now_s
        kind = (job.kind, job.num_gpus)
        proposal = None
        if changes.freed or job.index in changes.arrived or is_overdue:
            if tentative.free.num and (is_paused or kind not in refused):
                proposal = _placed(tentative, waiting, sizes, len(order) - 1 - place)
            proposal = proposal or tentative.on_reserved_gpus(waiting)
        if proposal is not None:
            tentative.accept(proposal)
            continue
        left.append(waiting)
        if not is_paused and tentative.within_quota(waiting):
            refused.add(kind)
            if is_overdue:
                tentative.reserve(job.num_gpus)
    return left


def _placed(
    tentative: TentativeGroups, waiting: Waiting, sizes: Sizes, num_behind: int
) -> Proposal | None:
    """The job back on its GPUs if it was paused and they are free, else on the best free ones."""
    home = tentative.back_home(waiting)
    if home is not None:
        return home
    for size in sizes.by_cost(waiting, max(0, num_behind - tentative.free.num)):
        if size <= tentative.free.num and (proposal := tentative.alone(waiting, size)):
            return proposal
    return None
