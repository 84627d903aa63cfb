"""Finds the running groups that a waiting job must be tried against."""

from __future__ import annotations

from collections.abc import Iterable

from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policies.tentative_groups import TentativeGroups
from tlora_megatron.scheduler.policy import Changes


class Hosts:
    """Candidate hosts for waiting jobs, without the pairs that were tried before.

    A group that has not changed since the last decision has already refused all jobs that waited
    then; asking it again would cost time and change nothing. So a job that waited then is tried
    against changed groups only.
    """

    def __init__(self, tentative: TentativeGroups, changes: Changes) -> None:
        self._tentative = tentative
        self._new = changes.arrived
        self._changed = set(changes.regrouped)

    def is_new(self, waiting: Waiting) -> bool:
        """True if the job arrived after the last decision."""
        return waiting.job.index in self._new

    def mark_changed(self, group: Group) -> None:
        """Notes that this decision has changed a group, so that old jobs are tried against it."""
        self._changed.add(group.number)

    def candidates(self, order: Iterable[Waiting]) -> list[Waiting]:
        """The jobs of `order` for which there can be a host."""
        groups = self._tentative.groups
        changed = {groups[number].base for number in self._changed if number in groups}
        return [w for w in order if w.job.index in self._new or w.job.base in changed]

    def of(self, waiting: Waiting) -> list[Group]:
        """Groups of the job's base model to try it against, by number."""
        groups = self._tentative.groups
        base = waiting.job.base
        numbers = groups if self.is_new(waiting) else self._changed
        return [groups[n] for n in sorted(numbers) if n in groups and groups[n].base == base]
