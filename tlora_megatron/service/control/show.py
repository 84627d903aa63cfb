"""Writes what only the controller knows where others can read it: machines, groups and figures.

Each is a row of the store that is written over when it has changed. Beside them are the reasons of
decisions: what the members of a new group gain, and how far they stay within their bounds. Reasons
name no job, since tenants read of decisions that touch others' jobs too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.scheduler.queue import Group, Job, Member
from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.records import LiveGang, LiveJob
from tlora_megatron.service.store import WHY_QUEUED, JobState

Body = dict[str, Any]
_MOST_REASONS = 200
"""Jobs in the queue of which it is said why they wait."""
Kind = Literal["start", "join", "leave", "move", "pause"]


class StatusWriter:
    """Shows the state."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._shown: dict[str, Body] = {}

    def forget(self) -> None:
        """Writes all again: it is unknown whether the last of it was kept."""
        self._shown.clear()

    def changed(self) -> dict[str, Body]:
        """Values that are not shown yet, by name."""
        now = {
            "cluster": self._cluster(),
            "groups": self._groups(),
            "figures": self._figures(),
            WHY_QUEUED: self._waiting(),
        }
        return {name: body for name, body in now.items() if body != self._shown.get(name)}

    def show(self, changed: Mapping[str, Body]) -> None:
        """Writes it, inside a transaction."""
        for name, body in changed.items():
            self._context.store.boards.write(name, body)
        self._shown.update(changed)

    def _cluster(self) -> Body:
        state = self._context.state
        machines, size = state.machines, state.machines.shape.gpus_per_node
        missing = [gpu // size for gpu in machines.missing]
        nodes = [
            {
                "node": node,
                "host": machines.hosts[node],
                "gpus": size - missing.count(node),
                "healthy": node not in machines.down,
            }
            for node in range(machines.shape.num_nodes)
        ]
        aside = [
            {"node": gpu // size, "gpu": gpu % size, "until": until_s}
            for gpu, until_s in sorted(state.set_aside.until_s.items())
        ]
        return {"policy": self._context.settings.policy, "nodes": nodes, "set_aside": aside}

    def _groups(self) -> Body:
        state = self._context.state
        decided = {name: state.fleet.cluster.groups[number] for number, name in state.names.items()}
        return {
            "groups": [
                self._group(gang, decided.get(gang.name)) for gang in list(state.gangs.values())
            ]
        }

    def _group(self, gang: LiveGang, group: Group | None) -> Body:
        jobs = dict.fromkeys(gang.members)
        predicted: dict[str, float] = {}
        factor = None
        if group is not None:
            own = {self._context.state.numbers[m.job.index].id: m for m in group.members}
            jobs |= dict.fromkeys(own)
            predicted = {job: m.tokens_per_s for job, m in own.items()}
            if any(member.job.is_open for member in group.members):
                predicted = {}
            factor = self._context.pricing.speeds.factor(group.kinds, len(group.gpus))
        reported = gang.reported
        return {
            "gang": gang.name,
            "epoch": gang.epoch,
            "state": gang.state,
            "layout": _layout(gang.plan),
            "predicted_tokens_per_s": round(sum(predicted.values()), 1) or None,
            "measured_tokens_per_s": round(sum(reported.values()), 1) if reported else None,
            "correction": factor and round(factor, 3),
            "members": [
                self._member(gang, self._context.state.jobs[job], predicted.get(job))
                for job in jobs
                if job in self._context.state.jobs
            ],
        }

    def _member(self, gang: LiveGang, live: LiveJob, predicted: float | None) -> Body:
        member, measured = gang.members.get(live.id), gang.reported.get(live.id)
        steady = measured if gang.reported_steady else None
        shown: Body = {
            "job": live.id,
            "phase": "decided" if member is None else member.phase,
            "driven": live.is_open,
            "gpus": live.num_gpus,
            "measured_tokens_per_s": measured and round(measured, 1),
        }
        if live.is_open:  # its speed is its client's
            return shown
        return {
            **shown,
            "bound": live.max_slowdown,
            "predicted_tokens_per_s": predicted and round(predicted, 1),
            "alone_tokens_per_s": live.priced and round(live.priced.isolated_tokens_per_s, 1),
            "slowdown": _slowdown(live.priced, steady) if live.priced and steady else None,
            "predicted_slowdown": (
                _slowdown(live.priced, predicted) if live.priced and predicted else None
            ),
        }

    def _waiting(self) -> Body:
        """Id -> why a queued job waits, of those that come first."""
        state = self._context.state
        jobs = [live for live in state.jobs.values() if live.state is JobState.QUEUED]
        jobs.sort(key=lambda live: (-live.priority, live.number))
        machines, shape = state.machines, state.machines.shape
        left_out = {*machines.missing, *state.set_aside.until_s}
        usable = {
            gpu
            for gpu in range(shape.num_gpus)
            if gpu not in left_out and gpu // shape.gpus_per_node not in machines.down
        }
        # What trains on GPUs that were set aside meanwhile frees none that others may use.
        groups = [one for one in state.fleet.cluster.groups.values() if usable & {*one.gpus}]
        held, total = len(usable & {gpu for one in groups for gpu in one.gpus}), len(usable)
        busy = f"{held} of {_count(total, 'GPU')} {'is' if held == 1 else 'are'} held by "
        busy += _count(sum(len(group.members) for group in groups), "job")
        ends = [group.last_end_s for group in groups if math.isfinite(group.last_end_s)]
        if ends:
            busy += f", the first free {_about(min(ends) - self._context.clock())}"
        return {
            live.id: self._why(live, place, total, total - held, busy)
            for place, live in enumerate(jobs[:_MOST_REASONS])
        }

    def _why(self, live: LiveJob, num_before: int, usable: int, free: int, busy: str) -> str:
        if live.pause is not None:
            return "shorter work has its GPUs, which are kept for it"
        if self._context.state.is_placed(live):
            return "it has a place, and its gang starts or makes room for it"
        if live.num_gpus > usable:
            return f"it asks for {_count(live.num_gpus, 'GPU')}, and {usable} can be used now"
        if live.num_gpus <= free and not num_before:
            return "the next decision gives it a place"
        return busy + (f"; {_count(num_before, 'job')} before it" if num_before else "")

    def _figures(self) -> Body:
        context, state = self._context, self._context.state
        gangs = list(state.gangs.values())
        used = [gang for gang in gangs if any(s.phase == "training" for s in gang.members.values())]
        return {
            "waiting": len(state.queue),
            "gpus_held": sum(len(gang.gpus) for gang in gangs),
            "gpus_used": sum(len(gang.gpus) for gang in used),
            "held_back": list(context.held_back),
            **{name: tally.to_dict() for name, tally in context.tallies.items()},
        }


def _layout(plan: Plan | None) -> Body:
    if plan is None:
        return {}
    return {
        "tp": plan.tp_size,
        "pp": plan.pp_size,
        "dp": plan.dp_size,
        "sequence_parallel": plan.sequence_parallel,
        "micro_batch_tokens": plan.micro_batch_tokens,
    }


def action_of(group: Group, before: Iterable[Group]) -> dict[str, Any]:
    """Describes the forming of a group by the groups that ran before; names are the caller's."""
    members = {member.job.index for member in group.members}
    old = [one for one in before if not members.isdisjoint(m.job.index for m in one.members)]
    stay = {member.job.index for one in old for member in one.members}
    new = [member for member in group.members if member.job.index not in stay]
    closed = [member for member in group.members if not member.job.is_open]
    kind = _kind(group, old)
    return {
        "kind": kind,
        "why": _sentence(kind, group, old, len(new)),
        "tokens_per_s": round(sum(member.tokens_per_s for member in closed), 1),
        "in_turn_tokens_per_s": _in_turn(closed) and round(_in_turn(closed), 1),
        "slowdowns": [
            None if m.job.is_open else _slowdown(m.job, m.tokens_per_s) for m in group.members
        ],
        "bounds": [None if m.job.is_open else m.job.max_slowdown for m in group.members],
    }


def pause_of(group: Group) -> dict[str, Any]:
    """Describes that a group's members wait while others have their GPUs."""
    number, gpus = len(group.members), len(group.gpus)
    first = f"{_count(number, 'job')} on {_count(gpus, 'GPU')} {'wait' if number > 1 else 'waits'}"
    kept = "they are kept" if gpus > 1 else "it is kept"
    kind: Kind = "pause"
    return {"kind": kind, "why": f"{first} for shorter work: {kept} for when that has ended"}


def _kind(group: Group, old: Sequence[Group]) -> Kind:
    if not old:
        return "start"
    if len(old) > 1 or old[0].gpus != group.gpus:
        return "move"
    kept = {member.job.index for member in old[0].members}
    return "join" if kept <= {member.job.index for member in group.members} else "leave"


def _sentence(kind: Kind, group: Group, old: Sequence[Group], num_new: int) -> str:
    size, gpus = len(group.members), _count(len(group.gpus), "GPU")
    if kind == "start":
        first = f"{_count(size, 'job')} {'start' if size > 1 else 'starts'} on {gpus}"
    elif kind == "join":
        verb = "join" if num_new > 1 else "joins"
        first = f"{_count(num_new, 'job')} {verb} {size - num_new} on {gpus}, where it is"
    elif kind == "leave":
        first = f"{_count(size, 'job')} {'stay' if size > 1 else 'stays'} on {gpus}"
    else:
        held = {gpu for one in old for gpu in one.gpus}
        first = f"{_count(size, 'job')} of {_count(len(old), 'gang')} on {_count(len(held), 'GPU')}"
        first += f" {'go' if size > 1 else 'goes'} to {gpus}"
        if num_new:
            first += f", with {num_new} that waited"
    return f"{first}: {_gain(group)}"


def _gain(group: Group) -> str:
    closed = [member for member in group.members if not member.job.is_open]
    driven = len(group.members) - len(closed)
    if not closed:
        return "driven by clients, it costs nothing while they think"
    beside = f", beside {driven} that clients drive" if driven else ""
    speed = sum(member.tokens_per_s for member in closed)
    if len(closed) == 1:
        return f"alone, {speed:,.0f} tokens/s{beside}"
    times = speed / _in_turn(closed)
    worst = max(closed, key=lambda m: _slowdown(m.job, m.tokens_per_s) / m.job.max_slowdown)
    return (
        f"{speed:,.0f} tokens/s, {times:.2f} times as much as in turn{beside}; the nearest to its "
        f"bound is {_slowdown(worst.job, worst.tokens_per_s):.2f} times slower than alone, of "
        f"{worst.job.max_slowdown:g} allowed"
    )


def _in_turn(members: Sequence[Member]) -> float:
    """Tokens per second if each member had its GPUs for itself for an equal share of the time."""
    rates = [member.job.isolated_tokens_per_s for member in members]
    return sum(rates) / max(1, len(rates))


def _slowdown(job: Job, tokens_per_s: float) -> float:
    """How many times slower a job is than alone on the GPUs that it asks for."""
    return round(job.isolated_tokens_per_s / tokens_per_s, 3)


def _about(seconds: float) -> str:
    """A time to go that changes seldom: it is written each time that it does."""
    if seconds < 60.0:
        return "within a minute"
    minutes = seconds / 60.0
    return f"in about {minutes:.0f} min" if minutes < 90.0 else f"in about {minutes / 60.0:.0f} h"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
