"""Forms groups: one arithmetic for policies that try and for the simulator that carries out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tlora_megatron.scheduler.group_throughput import GroupRates, Kinds, Speeds
from tlora_megatron.scheduler.policy import (
    Changes,
    ClusterShape,
    ClusterState,
    Decision,
    FreeGpus,
    RegroupCost,
)
from tlora_megatron.scheduler.queue import Group, Job, Member, Pause, Waiting, WaitingQueue

_TOLERANCE = 1e-9
"""Relative tolerance: a speed or end equal to its bound must not fail on rounding."""

_LATE_S = 1e-3
"""A job that comes back so much later than it must is late."""


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
    vacated_s: Mapping[int, float] | None = None,
) -> Group:
    """Forms a group on `gpus`; it trains after its save, move and re-plan, and others' saves.

    `vacated_s` says of GPUs how long the state of those who leave them is being saved.
    """
    late_s = 0.0
    if vacated_s and not parts.running:
        late_s = max([vacated_s.get(gpu, 0.0) for gpu in gpus])
    ready_s = max([now_s + late_s, *(group.ready_s for group, _ in parts.running)])
    sources = {group.number: group for group, _ in parts.running}
    stay = next((group.number for group in sources.values() if group.gpus == gpus), None)
    moved = [member.job for group, member in parts.running if group.number != stay]
    # From the queue, those that continue from a checkpoint.
    moved += [w.job for w in parts.joining if w.tokens_left < w.job.tokens]
    ready_s += cost.pause_s(tuple(sources.values()), gpus, moved)
    by_kind = rates.by_kind
    members = [
        replace(
            member,
            tokens_per_s=by_kind[member.job.kind],
            tokens_left=group.tokens_left(member, now_s),
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


def paused(
    group: Group, member: Member, *, now_s: float, cost: RegroupCost, end_by_s: float = math.inf
) -> Waiting:
    """A member that leaves its GPUs for a while; others who were paused need them by `end_by_s`."""
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


def up_to_date(
    group: Group, jobs: Mapping[int, tuple[Job, float]], by_kind: Mapping[int, float], now_s: float
) -> Group:
    """A running group with its members' prices and tokens left as they are known now, by job.

    A deadline moves with the time that the job takes alone. One that is missed moves to the end
    that is expected: nothing may delay the job further.
    """
    members = []
    for member in group.members:
        job, left = jobs[member.job.index]
        rate = by_kind.get(job.kind, member.tokens_per_s)
        deadline_s = member.deadline_s
        if not job.is_open:
            deadline_s += job.max_slowdown * (job.isolated_s - member.job.isolated_s)
        known = replace(member, job=job, tokens_per_s=rate, tokens_left=left)
        end_s = now_s + known.tokens_left / rate
        members.append(replace(known, deadline_s=max(deadline_s, end_s)))
    return replace(group, members=tuple(members), ready_s=now_s)


def speeds_in_bounds(jobs: list[Job], by_kind: Mapping[int, float]) -> bool:
    """True if each job, by the speed of its kind, is at least as fast as its bound demands."""
    return all(by_kind[job.kind] * (1 + _TOLERANCE) >= job.least_tokens_per_s for job in jobs)


def ends_in_bounds(group: Group, doubt: float = 0.0, fresh: Collection[int] = ()) -> bool:
    """True if each member meets its deadline provided that nothing changes; pauses are included.

    `doubt` is the share by which one may be slower than its speed; those in `fresh` are not.
    """
    late = doubt / (1 - doubt)
    return all(
        group.end_s(m) + (m.job.index not in fresh) * late * (group.end_s(m) - group.ready_s)
        <= m.deadline_s * (1 + _TOLERANCE) + 1e-6
        for m in group.members
    )


class InvariantError(RuntimeError):
    """The scheduler state is inconsistent: a bug in how it is kept, or in a policy."""


def require(holds: bool, sentence: str) -> None:
    """Raises `InvariantError` with the given sentence if something does not hold."""
    if not holds:
        raise InvariantError(sentence)


class Fleet:
    """Keeps what runs where and what each tenant holds."""

    def __init__(
        self, *, shape: ClusterShape, speeds: Speeds, quotas: Mapping[str, int] | None = None
    ) -> None:
        self.cluster = ClusterState(shape=shape, free=FreeGpus.all_of(shape), quotas=quotas or {})
        self.changes = Changes()
        self._speeds = speeds
        self._down: set[int] = set()
        self._where: dict[int, int] = {}
        self._num_groups = 0

    @property
    def busy_gpus(self) -> int:
        down = len(self._down) * self.cluster.shape.gpus_per_node
        return self.cluster.shape.num_gpus - down - self.cluster.free.num

    def can_ever_run(self, job: Job) -> bool:
        """True if the job could start on an empty cluster."""
        quota = self.cluster.quotas.get(job.tenant, job.num_gpus)
        return job.num_gpus <= min(quota, self.cluster.shape.num_gpus)

    def group_of(self, index: int) -> Group | None:
        """The group in which the job of this index trains; None if it does not run."""
        number = self._where.get(index)
        return None if number is None else self.cluster.groups[number]

    def open(self, group: Group) -> None:
        """Puts a group on free GPUs."""
        self.cluster.free.take(group.gpus)
        self.cluster.groups[group.number] = group
        for member in group.members:
            self._where[member.job.index] = group.number

    def close(self, group: Group, now_s: float) -> None:
        """Takes a group off its GPUs at `now_s`."""
        del self.cluster.groups[group.number]
        self.changes.regrouped.discard(group.number)
        self.cluster.free.give(group.gpus)
        self.changes.freed = True

    def carry_on(self, group: Group, without: Collection[Member], now_s: float) -> None:
        """Lets the remaining members of a closed group train on, whatever the model says.

        They have the same GPUs, and no pause.
        """
        gone = {member.job.index for member in without}
        left = [member for member in group.members if member.job.index not in gone]
        if not left:
            return
        kinds = tuple(sorted([member.job.kind for member in left]))
        rates = self._speeds.rates(kinds, len(group.gpus))
        now: Mapping[int, float] = {member.job.kind: member.tokens_per_s for member in left}
        by_kind = now if rates is None else rates.by_kind
        members = tuple(
            replace(
                member,
                tokens_per_s=max(member.tokens_per_s, by_kind[member.job.kind]),
                tokens_left=group.tokens_left(member, now_s),
            )
            for member in left
        )
        number, ready_s = self.next_number(), max(now_s, group.ready_s)
        rest = Group(
            number=number, members=members, gpus=group.gpus, formed_s=now_s, ready_s=ready_s
        )
        self.open(rest)
        self.changes.regrouped.add(number)

    def carry_out(
        self,
        decisions: Sequence[Decision],
        queue: WaitingQueue,
        *,
        now_s: float,
        cost: RegroupCost,
        keeps_bounds: bool = False,
    ) -> list[Group]:
        """Dissolves and forms groups as decided, and takes the jobs that start from the queue.

        Args:
            cost: pauses of the new groups.
            keeps_bounds: require that every new group keeps its members' bounds.

        Returns:
            The new groups, in the order of the decisions.

        Raises:
            InvariantError: if a decision breaks a rule.
        """
        loose: dict[int, tuple[Group, Member]] = {}
        vacated_s: dict[int, float] = {}
        for number in [number for decision in decisions for number in decision.dissolve]:
            group = self.cluster.groups[number]
            self.close(group, now_s)
            loose.update((member.job.index, (group, member)) for member in group.members)
            save_s = cost.save_s([member.job for member in group.members])
            vacated_s.update(dict.fromkeys(group.gpus, save_s))
        starting = {index for decision in decisions for index in decision.members}
        for index in [index for decision in decisions for index in decision.pause]:
            group, member = loose.pop(index)
            end_by_s = queue.needed_s(group.gpus, without=starting)
            queue.add(paused(group, member, now_s=now_s, cost=cost, end_by_s=end_by_s))
            del self._where[index]
        groups = []
        for decision in decisions:
            group = self._formed(decision, loose, queue, vacated_s, now_s=now_s, cost=cost)
            if keeps_bounds:
                by_kind = {member.job.kind: member.tokens_per_s for member in group.members}
                fast = speeds_in_bounds([member.job for member in group.members], by_kind)
                require(
                    ends_in_bounds(group) and fast,
                    f"slowdown bounds must hold for jobs {decision.members}",
                )
            self.open(group)
            groups.append(group)
        require(not loose, f"a dissolved group's members must go on, got {sorted(loose)} left")
        # The GPUs that the decisions themselves gave back are no news to the policy.
        self.changes.freed = False
        self._end_ousted(queue, groups)
        return groups

    def _formed(
        self,
        decision: Decision,
        loose: dict[int, tuple[Group, Member]],
        queue: WaitingQueue,
        vacated_s: Mapping[int, float],
        *,
        now_s: float,
        cost: RegroupCost,
    ) -> Group:
        joining = [index for index in decision.members if index not in loose]
        for index in joining:
            if queue[index].pause is None:  # its tenant is charged while it is paused
                self.charge(queue[index].job)
        parts = Parts(
            running=tuple(loose.pop(index) for index in decision.members if index in loose),
            joining=tuple(queue.remove(index) for index in joining),
        )
        rates = self.rates(parts, len(decision.gpus))
        require(len({job.base for job in parts.jobs}) == 1, "members must share a base model")
        return formed(
            parts,
            gpus=decision.gpus,
            rates=rates,
            now_s=now_s,
            cost=cost,
            number=self.next_number(),
            vacated_s=vacated_s,
        )

    def charge(self, job: Job) -> None:
        """Counts the GPUs that a starting job asks for against its tenant's quota."""
        held = self.cluster.tenant_gpus.get(job.tenant, 0) + job.num_gpus
        quota = self.cluster.quotas.get(job.tenant, held)
        require(held <= quota, f"tenant {job.tenant!r} must hold at most {quota} GPUs, got {held}")
        self.cluster.tenant_gpus[job.tenant] = held

    def leave(self, job: Job) -> None:
        """Removes a job that no longer runs."""
        del self._where[job.index]
        self.discharge(job)

    def discharge(self, job: Job) -> None:
        """Counts the GPUs that a job asks for against its tenant no more."""
        self.cluster.tenant_gpus[job.tenant] -= job.num_gpus

    def end_late_pauses(self, queue: WaitingQueue, now_s: float) -> None:
        """Lets jobs that can no longer come back within their bounds wait before all others.

        Those on their GPUs are slower than predicted, and no plan holds such a bound: the GPUs
        would stay taken for ever. Each has a new bound from its next start on.
        """
        for waiting in queue.paused():
            if waiting.pause and waiting.pause.back_by_s < now_s - _LATE_S:
                job = replace(waiting.job, due_s=min(waiting.job.due_s, now_s))
                self._end_claim(queue, replace(waiting, job=job, queued_s=now_s))

    def _end_ousted(self, queue: WaitingQueue, groups: Sequence[Group]) -> None:
        """Ends claims to GPUs that new groups of more urgent jobs do not give back in time."""
        for group in groups:
            level = max(member.job.priority for member in group.members)
            for waiting in queue.paused():
                if waiting.pause and waiting.job.priority < level:
                    late = group.last_end_s > waiting.pause.back_by_s + _LATE_S
                    if late and not set(group.gpus).isdisjoint(waiting.pause.gpus):
                        self._end_claim(queue, waiting)

    def _end_claim(self, queue: WaitingQueue, waiting: Waiting) -> None:
        queue.remove(waiting.job.index)
        queue.add(replace(waiting, pause=None))
        self.discharge(waiting.job)
        self.changes.arrived.add(waiting.job.index)
        self.changes.freed = True  # others may have the GPUs that were kept for it

    def node_down(self, node: int) -> None:
        """Withdraws the GPUs of a failed node; no group may hold them."""
        self._down.add(node)
        self.cluster.free.take(self.cluster.shape.gpus_of(node))

    def node_up(self, node: int) -> None:
        """Makes the GPUs of a repaired node free again."""
        self._down.remove(node)
        self.cluster.free.give(self.cluster.shape.gpus_of(node))
        self.changes.freed = True

    def rates(self, parts: Parts, num_gpus: int) -> GroupRates:
        """Speeds of the members of a group, which must fit the memory."""
        rates = self._speeds.rates(parts.kinds, num_gpus)
        if rates is None:
            names = ", ".join(job.name for job in parts.jobs)
            raise InvariantError(f"memory of {num_gpus} GPUs must hold jobs {names}")
        return rates

    def next_number(self) -> int:
        self._num_groups += 1
        return self._num_groups
