"""Forms groups: one arithmetic for policies that try and for the simulator that carries out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tlora_megatron.scheduler.group_throughput import GroupRates, Kinds
from tlora_megatron.scheduler.policy import RegroupCost
from tlora_megatron.scheduler.queue import Group, Job, Member, Pause, Waiting

_TOLERANCE = 1e-9
"""Relative tolerance: a speed or end equal to its bound must not fail on rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The members that a group is formed from."""

    running: tuple[tuple[Group, Member], ...] = ()
    """Members of running groups."""
    joining: tuple[Waiting, ...] = ()
    """Jobs from the queue."""

    @classmethod
    def of(cls, group: Group) -> Parts:
        """The members of a running group as they are."""
        return cls(running=tuple((group, member) for member in group.members))

    def __add__(self, other: Parts) -> Parts:
        return Parts(running=self.running + other.running, joining=self.joining + other.joining)

    def __len__(self) -> int:
        return len(self.running) + len(self.joining)

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all members."""
        return [member.job for _, member in self.running] + [w.job for w in self.joining]

    @property
    def kinds(self) -> Kinds:
        """The kinds of all members, ascending."""
        return tuple(sorted([job.kind for job in self.jobs]))


def formed(
    parts: Parts,
    *,
    gpus: tuple[int, ...],
    rates: GroupRates,
    now_s: float,
    cost: RegroupCost,
    number: int,
    vacated_s: float = 0.0,
) -> Group:
    """Forms a group of `parts` on `gpus`; it trains after its save, move and re-plan.

    Args:
        vacated_s: seconds until those who held the GPUs have saved their state.
    """
    ready_s = max([now_s + vacated_s, *(group.ready_s for group, _ in parts.running)])
    ready_s += _pause_s(parts, gpus, cost)
    by_kind = rates.by_kind
    members = [
        Member(
            job=member.job,
            tokens_per_s=by_kind[member.job.kind],
            tokens_left=group.tokens_left(member, now_s),
            started_s=member.started_s,
            deadline_s=member.deadline_s,
        )
        for group, member in parts.running
    ]
    members += [_joined(waiting, by_kind[waiting.job.kind], ready_s) for waiting in parts.joining]
    return Group(number=number, members=tuple(members), gpus=gpus, formed_s=now_s, ready_s=ready_s)


def _joined(waiting: Waiting, tokens_per_s: float, ready_s: float) -> Member:
    pause = waiting.pause
    end_s = ready_s + waiting.tokens_left / tokens_per_s
    return Member(
        job=waiting.job,
        tokens_per_s=tokens_per_s,
        tokens_left=waiting.tokens_left,
        started_s=pause.started_s if pause else ready_s,
        deadline_s=pause.deadline_s if pause else waiting.job.deadline_s(ready_s, end_s),
    )


def carried_on(
    group: Group, parts: Parts, *, rates: GroupRates, now_s: float, number: int
) -> Group:
    """Forms the group that remains when members of `group` leave: same GPUs, no pause.

    It may keep its plan, so that no member becomes slower because another one leaves.
    """
    members = tuple(
        Member(
            job=member.job,
            tokens_per_s=max(member.tokens_per_s, rates.by_kind[member.job.kind]),
            tokens_left=group.tokens_left(member, now_s),
            started_s=member.started_s,
            deadline_s=member.deadline_s,
        )
        for _, member in parts.running
    )
    return Group(
        number=number,
        members=members,
        gpus=group.gpus,
        formed_s=now_s,
        ready_s=max(now_s, group.ready_s),
    )


def paused(
    group: Group, member: Member, *, now_s: float, cost: RegroupCost, end_by_s: float = math.inf
) -> Waiting:
    """A member that leaves its GPUs to others for a while, and waits to come back.

    Args:
        end_by_s: when others who were paused before need these GPUs.
    """
    left = group.tokens_left(member, now_s)
    back_s = cost.pause_s((), group.gpus, [member.job]) + left / member.tokens_per_s
    return Waiting(
        job=member.job,
        tokens_left=left,
        queued_s=now_s,
        pause=Pause(
            gpus=group.gpus,
            back_by_s=min(member.deadline_s, end_by_s) - back_s,
            started_s=member.started_s,
            deadline_s=member.deadline_s,
        ),
    )


def _pause_s(parts: Parts, gpus: tuple[int, ...], cost: RegroupCost) -> float:
    sources = {group.number: group for group, _ in parts.running}
    stay = next((group.number for group in sources.values() if group.gpus == gpus), None)
    moved = [member.job for group, member in parts.running if group.number != stay]
    moved += [waiting.job for waiting in parts.joining if waiting.has_state]
    return cost.pause_s(tuple(sources.values()), gpus, moved)


def speeds_in_bounds(jobs: list[Job], rates: GroupRates) -> bool:
    """True if each job is at least as fast as its bound demands."""
    by_kind = rates.by_kind
    return all(by_kind[job.kind] * (1 + _TOLERANCE) >= job.least_tokens_per_s for job in jobs)


def ends_in_bounds(group: Group) -> bool:
    """True if each member meets its deadline provided that nothing changes; pauses are included."""
    return all(group.end_s(m) <= m.deadline_s * (1 + _TOLERANCE) + 1e-6 for m in group.members)
