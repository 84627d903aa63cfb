"""Running groups as hosts: which of them a waiting job must be tried against."""

from __future__ import annotations

from collections.abc import Iterable

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policies.tentative_groups import Draft
from tlora_megatron.scheduler.queue import WaitingQueue


class Hosts:
    """The groups of a draft that a waiting job may not have been tried against.

    A group that has not changed since the last decision refused all jobs that were there; asking it
    again costs time and changes nothing. So an old job is tried against changed groups only.
    """

    def __init__(self, draft: Draft, jobs: WaitingQueue, cluster: ClusterState) -> None:
        self._draft = draft
        self._new = frozenset(jobs.arrived)
        self._changed = set(cluster.changed)

    def is_new(self, waiting: Waiting) -> bool:
        """Whether no decision has seen the job yet."""
        return waiting.job.index in self._new

    def touched(self, group: Group) -> None:
        """Notes that a group has changed within this draft."""
        self._changed.add(group.number)

    def candidates(self, order: Iterable[Waiting]) -> list[Waiting]:
        """The jobs of `order` for which there can be a host."""
        changed = {self._draft.groups[n].base for n in self._changed if n in self._draft.groups}
        return [w for w in order if w.job.index in self._new or w.job.base in changed]

    def of(self, waiting: Waiting) -> list[Group]:
        """Groups of the job's base that it may not have been tried against, by number."""
        groups = self._draft.groups
        base = waiting.job.base
        numbers = groups if self.is_new(waiting) else self._changed
        return [groups[n] for n in sorted(numbers) if n in groups and groups[n].base == base]
