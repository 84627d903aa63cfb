"""Turns what is decided and what runs now into the next actions: a pure function.

It is called again after everything that happens, with the same targets, and says what may be done
*now*; so an action that has to wait for another needs no memory of it. Two rules make it safe:
a gang's members change once at a time, and a job is prepared only where no gang has it any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["preparing", "prepared", "joining", "training", "leaving"]
"""Where a job stands in its gang."""

ActionKind = Literal["start", "prepare", "join", "leave", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A gang as it is decided to be."""

    gang: str
    gpus: tuple[int, ...]
    """Cluster-wide numbers, ascending."""
    members: tuple[str, ...]
    """Ids of its jobs."""
    may_start: bool = True
    """False while a gang that died waits before it is started again."""
    one_by_one: bool = False
    """Jobs join alone, so that a first round that fails names the one at fault."""
    beside: bool = False
    """It may start while jobs leave the gangs that have its GPUs: they have memory for both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GangNow:
    """A gang as it is now; one of which some process may still live."""

    gang: str
    gpus: tuple[int, ...]
    state: Literal["starting", "running", "stopping"]
    members: Mapping[str, Phase] = field(default_factory=dict)
    """The jobs it holds, by id."""
    idle_s: float = 0.0
    """For how long it has held none."""
    in_first_round: Collection[str] = ()
    """Jobs that have joined and not finished a round yet."""
    gathers: bool = False
    """No job has joined it yet: one that is prepared waits a moment for those that soon will be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One thing to do now."""

    kind: ActionKind
    gang: str
    job: str | None = None
    more: bool = False
    """Another one follows that joins the same gang."""


def plan_actions(
    targets: Sequence[Target], gangs: Sequence[GangNow], *, idle_keep_s: float
) -> list[Action]:
    """The actions that may be taken now to make the gangs what the targets say.

    A gang without a target ends if its GPUs are wanted, or if it was idle for `idle_keep_s`; else
    its jobs leave it and it is kept warm. A target without a gang is started on free GPUs, or
    beside gangs that all jobs are leaving: each goes on in the new gang as soon as it is saved.
    """
    by_name = {target.gang: target for target in targets}
    running = {gang.gang for gang in gangs}
    missing = [target for target in targets if target.gang not in running]
    claims = {
        gang.gang: [t for t in targets if not set(t.gpus).isdisjoint(gang.gpus)] for gang in gangs
    }
    handing = {
        gang.gang
        for gang in gangs
        if gang.gang not in by_name and _hands_over(gang, claims[gang.gang], running)
    }
    held_jobs = {job for gang in gangs for job in gang.members}
    actions: list[Action] = []
    for gang in gangs:
        target = by_name.get(gang.gang)
        if target is None:
            is_wanted = bool(claims[gang.gang]) and gang.gang not in handing
            actions += _without_target(gang, is_wanted, idle_keep_s)
        else:
            actions += _towards(target, gang, held_jobs)
    left = {g.gang for g in gangs if g.gang in handing and "joining" not in g.members.values()}
    held = {gpu for gang in gangs if gang.gang not in left for gpu in gang.gpus}
    actions += _starts(missing, held)
    return actions


def _hands_over(gang: GangNow, claims: Sequence[Target], running: Collection[str]) -> bool:
    """True if gangs that are to have the GPUs of one without a target need not wait for its end."""
    if gang.state != "running" or not gang.members or not claims:
        return False
    return all(target.beside or target.gang in running for target in claims)


def _without_target(gang: GangNow, is_wanted: bool, idle_keep_s: float) -> Iterable[Action]:
    if gang.state == "stopping":
        return
    if is_wanted or (not gang.members and gang.idle_s >= idle_keep_s):
        yield Action(kind="stop", gang=gang.gang)
    elif gang.state == "running":
        yield from _leaves(gang, gang.members)


def _towards(target: Target, gang: GangNow, held_jobs: Collection[str]) -> Iterable[Action]:
    """The changes of a gang's members; none while it starts or stops."""
    if gang.state != "running":
        return
    for job in target.members:
        if job not in held_jobs:
            yield Action(kind="prepare", gang=gang.gang, job=job)
    if "joining" in gang.members.values() or "leaving" in gang.members.values():
        return
    going = [job for job in gang.members if job not in target.members]
    if going:
        yield from _leaves(gang, going)
        return
    ready = [job for job, phase in gang.members.items() if phase == "prepared"]
    if target.one_by_one:
        ready = [] if gang.in_first_round else ready[:1]
    elif gang.gathers and "preparing" in gang.members.values():
        return
    for job in ready:
        yield Action(kind="join", gang=gang.gang, job=job, more=job != ready[-1])


def _leaves(gang: GangNow, jobs: Iterable[str]) -> Iterable[Action]:
    if "joining" in gang.members.values():
        return
    for job in jobs:
        if gang.members[job] != "leaving":
            yield Action(kind="leave", gang=gang.gang, job=job)


def _starts(missing: Sequence[Target], held: Collection[int]) -> Iterable[Action]:
    taken = set(held)
    for target in missing:
        if target.may_start and taken.isdisjoint(target.gpus):
            taken.update(target.gpus)
            yield Action(kind="start", gang=target.gang)
