"""The scheduler's state: jobs, queue, groups as decided, and gangs as they are.

Groups are what the policy decided; gangs are what runs. The state names the gang of each group. It
is rebuilt from the store whenever a controller starts or has lost track.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.scheduler.fleet import Fleet, InvariantError, Parts, formed, up_to_date
from tlora_megatron.scheduler.group_throughput import GroupRates, Speeds
from tlora_megatron.scheduler.policy import NO_COST, Decision, RegroupCost
from tlora_megatron.scheduler.queue import Group, Job, Member, Waiting, WaitingQueue
from tlora_megatron.service.control.actions import Target
from tlora_megatron.service.control.pricing import (
    Machines,
    MemoryShares,
    Pricing,
    SetAside,
    pause_from_json,
    pause_to_json,
)
from tlora_megatron.service.control.records import LiveGang, LiveJob

_SHARED_MEMORY = 0.85
"""Two gangs may have so much of a GPU's memory by the planner's estimates, which are for one."""


class SchedulerState:
    """A controller's knowledge of jobs that wait, of groups as decided, and of gangs that run."""

    def __init__(self, machines: Machines, pricing: Pricing, *, last_gang: int) -> None:
        """Begins with an empty cluster; `last_gang` is the number of the last gang that started."""
        self.machines = machines
        self.pricing = pricing
        self.jobs: dict[str, LiveJob] = {}
        self.numbers: dict[int, LiveJob] = {}
        self.gangs: dict[str, LiveGang] = {}
        self.queue = WaitingQueue()
        self.fleet = Fleet(shape=machines.shape, speeds=pricing.speeds)
        self.fleet.cluster.free.take(machines.missing)
        for node in machines.down:
            self.fleet.node_down(node)
        self.set_aside = SetAside(self.fleet.cluster.free)
        self.names: dict[int, str] = {}
        """Gang of each group, by the group's number."""
        self.starts_from: dict[str, float] = {}
        """When a gang that died may be started again."""
        self.one_by_one: set[str] = set()
        """Gangs whose jobs join alone, after a first round that failed."""
        self.last_gang = last_gang

    # Jobs

    def add(self, live: LiveJob) -> None:
        self.jobs[live.id] = live
        self.numbers[live.number] = live

    def remove(self, live: LiveJob) -> None:
        del self.jobs[live.id]
        del self.numbers[live.number]

    def enqueue(self, live: LiveJob, now_s: float) -> bool:
        """Lets a job wait; False if no GPUs of the cluster can ever hold it."""
        live.priced = self.pricing.price(live, self.machines.shape.num_gpus)
        if live.priced is None:
            return False
        tokens_left = live.priced.tokens * live.share_left
        self.queue.add(Waiting(job=live.priced, tokens_left=tokens_left, queued_s=now_s))
        self.fleet.changes.arrived.add(live.number)
        return True

    def pause_of(self, live: LiveJob) -> Mapping[str, Any] | None:
        """Where a paused job comes back, as its row keeps it; None unless a decision paused it."""
        pause = self.queue[live.number].pause if live.number in self.queue else None
        return None if pause is None else pause_to_json(pause, self.machines)

    def pause_again(self, live: LiveJob) -> None:
        """Gives a waiting job back the GPUs that its row keeps for it, if they are there."""
        pause = None if live.pause is None else pause_from_json(live.pause, self.machines)
        if pause is None or live.number not in self.queue:
            return
        waiting = self.queue.remove(live.number)
        self.fleet.charge(waiting.job)
        self.queue.add(replace(waiting, pause=pause))

    def saved(self, live: LiveJob) -> None:
        """Counts what is left of a paused job from the step at which it was saved."""
        if live.number in self.queue and self.queue[live.number].pause is not None:
            waiting = self.queue.remove(live.number)
            left = waiting.job.tokens * live.share_left
            self.queue.add(_with_left(waiting, left, self.pricing.speeds))

    def withdraw(self, live: LiveJob, now_s: float) -> None:
        """Takes a job out of the queue, or out of the group it was decided to be in."""
        if live.number in self.queue:
            waiting = self.queue.remove(live.number)
            if waiting.pause is not None:
                self.fleet.discharge(waiting.job)
            self.fleet.changes.arrived.discard(live.number)
            return
        group = self.fleet.group_of(live.number)
        if group is None:
            return
        name = self.names.pop(group.number)
        member = next(m for m in group.members if m.job.index == live.number)
        self.fleet.close(group, now_s)
        self.fleet.leave(member.job)
        self.fleet.carry_on(group, [member], now_s)
        others = [m for m in group.members if m is not member]
        rest = self.fleet.group_of(others[0].job.index) if others else None
        if rest is not None:
            self.names[rest.number] = name

    def is_placed(self, live: LiveJob) -> bool:
        """True if it was decided where the job trains."""
        return self.fleet.group_of(live.number) is not None

    def is_held(self, live: LiveJob) -> bool:
        return any(live.id in gang.members for gang in self.gangs.values())

    # Groups

    def members(self, gang: str) -> list[LiveJob]:
        """The jobs that a gang is decided to have."""
        groups = self.fleet.cluster.groups
        own = [groups[number] for number, name in self.names.items() if name == gang]
        return [self.numbers[m.job.index] for group in own for m in group.members]

    def targets(self, now_s: float, *, shares: bool = False) -> list[Target]:
        """The gangs as decided, in their groups' order;

        `shares`: gangs may start on GPUs still taken.
        """
        targets = []
        for number, group in self.fleet.cluster.groups.items():
            name = self.names[number]
            targets.append(
                Target(
                    gang=name,
                    gpus=group.gpus,
                    members=tuple(self.numbers[m.job.index].id for m in group.members),
                    may_start=self.starts_from.get(name, 0.0) <= now_s,
                    one_by_one=name in self.one_by_one,
                    beside=shares and name not in self.gangs and self._fits_beside(group),
                )
            )
        return targets

    def _fits_beside(self, group: Group) -> bool:
        """True if a gang has memory to load its base while others train on its GPUs."""
        loads, base = self._loads(group), self.pricing.base(group.base)
        plan = base.plan(loads, len(group.gpus))
        own = base.memory(loads, plan)
        there = [g for g in self.gangs.values() if not set(group.gpus).isdisjoint(g.gpus)]
        others = [self._memory(gang) for gang in there]
        if own is None or None in others:
            return False
        held = [other for other in others if other is not None]
        while_loading = own.bare + sum(other.full for other in held)
        while_training = own.full + sum(other.bare for other in held)
        return max(while_loading, while_training) <= _SHARED_MEMORY

    def _loads(self, group: Group) -> list[JobLoad]:
        loads = [self.numbers[m.job.index].load for m in group.members]
        return [load for load in loads if load]

    def _memory(self, gang: LiveGang) -> MemoryShares | None:
        loads = [self.jobs[job].load for job in gang.members if job in self.jobs]
        return self.pricing.base(gang.pool).memory([load for load in loads if load], gang.plan)

    def can_form(self, decision: Decision) -> bool:
        """True if a group can be formed as decided: one base, and memory for all."""
        jobs = [self._known(index) for index in decision.members]
        kinds = tuple(sorted(job.kind for job in jobs))
        if len({job.base for job in jobs}) > 1:
            return False
        return self.pricing.speeds.rates(kinds, len(decision.gpus)) is not None

    def _known(self, index: int) -> Job:
        """A job that waits or is decided to run, as the state has it."""
        if index in self.queue:
            return self.queue[index].job
        group = self.fleet.group_of(index)
        assert group is not None, f"job {index} must wait or run"
        return next(member.job for member in group.members if member.job.index == index)

    def carry_out(
        self, decisions: Sequence[Decision], now_s: float, cost: RegroupCost
    ) -> list[Group]:
        """Applies decisions to the state, and finds a gang for each new group."""
        before = {
            number: (self.names.pop(number), self.fleet.cluster.groups[number])
            for decision in decisions
            for number in decision.dissolve
        }
        groups = self.fleet.carry_out(decisions, self.queue, now_s=now_s, cost=cost)
        for group in groups:
            self.names[group.number] = self._gang_for(group, list(before.values()))
        return [self.fleet.cluster.groups[g.number] for g in groups]

    def _gang_for(self, group: Group, dissolved: list[tuple[str, Group]]) -> str:
        """The gang that stays, an idle one, or a new name."""
        for name, old in dissolved:
            if old.gpus == group.gpus and old.base == group.base:
                gang = self.gangs.get(name)
                if gang is None or self._holds(gang, group):
                    return name
        taken = set(self.names.values()) | {name for name, _ in dissolved}
        for gang in self.gangs.values():
            if gang.name not in taken and gang.gpus == group.gpus and self._holds(gang, group):
                return gang.name
        for gang in self.gangs.values():
            if gang.name not in taken and self._takes_over(gang, group):
                return gang.name
        taken |= self.gangs.keys()
        names = (f"g{number}" for number in itertools.count(self.last_gang + 1))
        return next(name for name in names if name not in taken)

    def _holds(self, gang: LiveGang, group: Group) -> bool:
        """True if the gang can take the group's members as it runs."""
        if gang.state == "stopping" or gang.pool != group.base:
            return False
        return self.pricing.base(gang.pool).holds(self._loads(group), gang.plan)

    def _takes_over(self, gang: LiveGang, group: Group) -> bool:
        """Moves a new group to the GPUs of an idle gang that has as many; True if it did."""
        free = self.fleet.cluster.free
        if gang.members or len(gang.gpus) != len(group.gpus) or not self._holds(gang, group):
            return False
        shape = self.fleet.cluster.shape
        if shape.tier(gang.gpus) > shape.tier(group.gpus):
            return False
        if not all(gpu in free.in_node(gpu // shape.gpus_per_node) for gpu in gang.gpus):
            return False
        free.give(group.gpus)
        free.take(gang.gpus)
        self.fleet.cluster.groups[group.number] = replace(group, gpus=gang.gpus)
        return True

    def adopt(self, gang: LiveGang, members: Iterable[LiveJob], now_s: float) -> None:
        """Takes up a gang that runs already, with those of its jobs that stay."""
        joining = []
        for live in members:
            live.priced = self.pricing.price(live, self.machines.shape.num_gpus)
            if live.priced is not None:
                left = live.priced.tokens * live.share_left
                joining.append(Waiting(job=live.priced, tokens_left=left, queued_s=now_s))
        if not joining:
            return
        parts = Parts(joining=tuple(joining))
        for waiting in joining:
            self.fleet.charge(waiting.job)
        group = formed(
            parts,
            gpus=gang.gpus,
            rates=self._rates(parts, len(gang.gpus)),
            now_s=now_s,
            cost=NO_COST,
            number=self.fleet.next_number(),
        )
        starts = {w.job.index: self.numbers[w.job.index].started_at or now_s for w in joining}
        group = replace(group, members=tuple(self._since(group, starts)), ready_s=now_s)
        self.fleet.open(group)
        self.names[group.number] = gang.name

    def _since(self, group: Group, started_s: Mapping[int, float]) -> Iterator[Member]:
        """The members of a group with the times at which they have first trained."""
        for member in group.members:
            at_s = started_s.get(member.job.index, group.ready_s)
            deadline_s = member.job.deadline_s(at_s, group.end_s(member))
            yield replace(member, started_s=at_s, deadline_s=deadline_s)

    def _rates(self, parts: Parts, num_gpus: int) -> GroupRates:
        """Speeds of a group; those of each job alone where the model says it cannot be."""
        try:
            return self.fleet.rates(parts, num_gpus)
        except InvariantError:
            alone = {job.kind: job.isolated_tokens_per_s / len(parts) for job in parts.jobs}
            return GroupRates(alone, sum(alone.values()))

    def refresh(self, group: Group, now_s: float) -> None:
        """Sets a running group's work left to what its jobs reported."""
        if now_s < group.ready_s:
            return
        jobs = {}
        for member in group.members:
            live = self.numbers[member.job.index]
            job = live.priced or member.job
            jobs[member.job.index] = (job, job.tokens * live.share_left)
        by_kind = self._rates(Parts.of(group), len(group.gpus)).by_kind
        self.fleet.cluster.groups[group.number] = up_to_date(group, jobs, by_kind, now_s)

    def reprice(self, now_s: float) -> None:
        """Prices all jobs again, after measured speeds have moved away from those in use."""
        waiting = [self.queue[n] for live in self.jobs.values() if (n := live.number) in self.queue]
        for entry in waiting:
            self.queue.remove(entry.job.index)
            live = self.numbers[entry.job.index]
            live.priced = self._priced(live)
            job = replace(live.priced, due_s=min(live.priced.due_s, entry.job.due_s))
            self.queue.add(replace(entry, job=job, tokens_left=job.tokens * live.share_left))
        for group in list(self.fleet.cluster.groups.values()):
            for member in group.members:
                live = self.numbers[member.job.index]
                live.priced = self._priced(live)
            self.refresh(group, now_s)

    def _priced(self, live: LiveJob) -> Job:
        found = self.pricing.price(live, self.machines.shape.num_gpus) or live.priced
        assert found is not None, f"job {live.id} must have been priced before"
        return found


def _with_left(waiting: Waiting, tokens_left: float, speeds: Speeds) -> Waiting:
    """A paused job with its work left as last reported: the more, the sooner it must come back."""
    pause = waiting.pause
    assert pause is not None, "only a paused job has a time to come back by"
    rates = speeds.rates((waiting.job.kind,), len(pause.gpus))
    later_s = 0.0 if rates is None else (tokens_left - waiting.tokens_left) / rates.total
    pause = replace(pause, back_by_s=pause.back_by_s - later_s)
    return replace(waiting, tokens_left=tokens_left, pause=pause)
