"""What a merge brings, in seconds of completion time over all jobs."""

from __future__ import annotations

from collections.abc import Iterable

from tlora_megatron.scheduler.draft import Draft
from tlora_megatron.scheduler.jobs import Group, Waiting


class Outlook:
    """When waiting jobs would start on GPUs of their own, and what GPU time is worth to them."""

    def __init__(self, draft: Draft, order: Iterable[Waiting], num_waiting: int) -> None:
        """`order`: the waiting jobs in the order in which they would start."""
        self._now_s = draft.now_s
        self._num_gpus = draft.shape.num_gpus
        self._num_others = num_waiting - 1
        ends = sorted((group.last_end_s, len(group.gpus)) for group in draft.groups.values())
        self._ends = [(draft.now_s, draft.free.num), *ends]
        self._ahead: dict[int, int] = {}
        demand = 0
        for waiting in order:
            demand += waiting.job.num_gpus
            self._ahead[waiting.job.index] = demand

    def start_s(self, waiting: Waiting) -> float:
        """When the GPUs of the jobs ahead of it and its own have become free, one after another."""
        demand = self._ahead[waiting.job.index]
        end = self._now_s
        for end, num_gpus in self._ends:
            demand -= num_gpus
            if demand <= 0:
                return end
        return end + demand * waiting.isolated_left_s / self._num_gpus

    def gain_s(self, waiting: Waiting, host: Group, merged: Group) -> float:
        """Seconds by which all jobs together end earlier with the merge than without it.

        The newcomer, against waiting for GPUs of its own; the host's members, slowed as long as it
        is there; and the others in the queue, who get the GPU seconds it does not take.
        """
        newcomer = next(m for m in merged.members if m.job.index == waiting.job.index)
        end = merged.end_s(newcomer)
        own_end = self.start_s(waiting) + waiting.isolated_left_s
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
        return own_end - end - delay + self._num_others * saved / self._num_gpus
