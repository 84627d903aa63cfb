"""Rates a merge: by how many seconds it brings forward the ends of all jobs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policies.reservation import soonest_nodes
from tlora_megatron.scheduler.policies.tentative_groups import TentativeGroups

_DELAY_WEIGHT, _OTHERS_WEIGHT = 2.0, 3.0
"""A host that takes one joining job will take more, and a queue that is there will last: both count
beyond the merge at hand. The best of 11 pairs on five cells of scripts/bench/simulate.py
(Philly and Lingjun, loads 2 to 5, seeds 0 and 1)."""


class MergeBenefit:
    """Compares a merge with waiting for free GPUs, for the joining job, its host and the queue."""

    def __init__(
        self, tentative: TentativeGroups, order: Sequence[Waiting], num_waiting: int
    ) -> None:
        """Plans when each job would start without merges.

        Args:
            tentative: the groups so far.
            order: the first waiting jobs, in the order in which they would start.
            num_waiting: number of all waiting jobs.
        """
        self._tentative = tentative
        self._room_s: dict[int, float] = {}
        self._now_s = tentative.now_s
        self._num_gpus = tentative.shape.num_gpus
        self._behind = {w.job.index: num_waiting - 1 - i for i, w in enumerate(order)}
        self._starts_s = list_schedule(tentative, order)

    def gain_s(self, waiting: Waiting, host: Group, merged: Group) -> float:
        """Weighted seconds by which jobs end earlier with the merge than without it.

        Three terms: the joining job gains against waiting for GPUs of its own; the host's members
        are slowed while it is there; and the jobs behind it in the queue get the GPU time that it
        does not take. One GPU second brings each of those forward by a second over the number of
        the cluster's GPUs.
        """
        index = waiting.job.index
        joining = next(m for m in merged.members if m.job.index == index)
        end = merged.end_s(joining)
        own_end = self._start_s(waiting) + waiting.isolated_left_s
        delay, last_end = 0.0, end
        pause = merged.ready_s - max(self._now_s, host.ready_s)
        speeds = {m.job.index: m.tokens_per_s for m in merged.members}
        for member in host.members:
            speed = speeds[member.job.index]
            left_s = host.tokens_left(member, self._now_s) / speed
            slowed_s = min(left_s, end - merged.ready_s)
            late = pause + slowed_s * max(0.0, 1 - speed / member.tokens_per_s)
            delay += late
            last_end = max(last_end, host.end_s(member) + late)
        longer = max(0.0, last_end - host.last_end_s) * len(host.gpus)
        saved = waiting.job.num_gpus * waiting.isolated_left_s - longer
        others = self._behind[index] * saved / self._num_gpus
        return own_end - end - _DELAY_WEIGHT * delay + _OTHERS_WEIGHT * others

    def _start_s(self, waiting: Waiting) -> float:
        """The job's start by the list schedule, but not before nodes have room for its GPUs."""
        index, num_gpus = waiting.job.index, waiting.job.num_gpus
        if num_gpus == 1:
            return self._starts_s[index]
        if num_gpus not in self._room_s:
            tentative = self._tentative
            groups = tentative.groups.values()
            _, self._room_s[num_gpus] = soonest_nodes(
                num_gpus, tentative.shape, tentative.free, groups, set()
            )
        return max(self._starts_s[index], self._room_s[num_gpus])


def list_schedule(tentative: TentativeGroups, order: Sequence[Waiting]) -> dict[int, float]:
    """Start times by job index if all jobs run alone, in this order, as GPUs become free.

    Counts GPUs only; on which nodes they are is ignored.
    """
    releases = [(group.last_end_s, len(group.gpus)) for group in tentative.groups.values()]
    heapq.heapify(releases)
    starts, now_s, free = {}, tentative.now_s, tentative.free.num
    for waiting in order:
        needed = waiting.job.num_gpus
        while free < needed and releases:
            end_s, num = heapq.heappop(releases)
            now_s, free = max(now_s, end_s), free + num
        starts[waiting.job.index] = now_s
        free -= needed
        heapq.heappush(releases, (now_s + waiting.isolated_left_s, needed))
    return starts
