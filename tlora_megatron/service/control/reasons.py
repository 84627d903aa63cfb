"""Says why a group was formed: what its members gain, and how far they stay within their bounds.

Sentences name no job, since tenants read of decisions that touch others' jobs too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tlora_megatron.scheduler.jobs import Group, Member

Kind = Literal["start", "join", "leave", "move", "pause"]


def action_of(group: Group, before: Iterable[Group]) -> dict[str, Any]:
    """Describes the forming of a group with the figures that it rests on; names are the caller's.

    Args:
        group: the new group.
        before: the groups that ran when it was decided.
    """
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
        "slowdowns": [None if m.job.is_open else _slowdown(m) for m in group.members],
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
    worst = max(closed, key=lambda member: _slowdown(member) / member.job.max_slowdown)
    return (
        f"{speed:,.0f} tokens/s, {times:.2f} times as much as in turn{beside}; the nearest to its "
        f"bound is {_slowdown(worst):.2f} times slower than alone, of "
        f"{worst.job.max_slowdown:g} allowed"
    )


def _in_turn(members: Sequence[Member]) -> float:
    """Tokens per second if each member had its GPUs for itself for an equal share of the time."""
    rates = [member.job.isolated_tokens_per_s for member in members]
    return sum(rates) / max(1, len(rates))


def _slowdown(member: Member) -> float:
    return round(member.job.isolated_tokens_per_s / member.tokens_per_s, 3)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
