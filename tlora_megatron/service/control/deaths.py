"""Deaths of gangs: which job, or which GPU, is to blame, and when a gang starts again.

A gang that died starts again, without the job that made it run out of memory. No job is lost: each
goes on from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.records import LiveGang, LiveJob

_LONGEST_WAIT_S = 60.0
_TRIAL_SAVES = 3
"""Checkpoints that a job makes alone before it is trusted again, once; they are a minute apart."""


def died(context: Context, gang: LiveGang, body: Mapping[str, Any]) -> None:
    """Handles the death of a gang, inside the transaction that takes in the event."""
    reason = str(body.get("reason", "no reason is known"))
    out_of_memory = bool(body.get("out_of_memory"))
    reported = [str(job) for job in body.get("newcomers", ())]
    joined = [job for job in reported or sorted(gang.in_first_round) if job in gang.members]
    starting = gang.state == "starting"
    was_killed = bool(body.get("was_killed"))
    died_at = None if out_of_memory else _died_at(context, gang, body)
    held = context.gang_ended(gang, why=reason, died_at=died_at, was_killed=was_killed)
    if starting:
        # No job had joined; those that wait for it may be why it cannot start.
        held = context.state.members(gang.name)
    names = ", ".join(live.name for live in held) or "none"
    what = "out_of_memory" if out_of_memory else "rank_died"
    context.say(
        what,
        f"gang {gang.name} died ({reason}); it starts again, and its jobs go on from their last "
        f"checkpoints: {names}",
        gang=gang.name,
    )
    held = [live for live in held if live.id in context.state.jobs]
    if out_of_memory and joined:
        _blame(context, gang, [live for live in held if live.id in joined], len(held))
    elif was_killed:  # no job is to blame
        for live in held:
            live.kills += 1
    else:
        count_death(context, held, reason)
    wait_for_start(context, gang, held)
    if died_at is not None and context.state.set_aside.died(
        context.state.machines.number(died_at), context.clock(), was_killed=was_killed
    ):
        message = (
            f"GPU {died_at[1]} of machine {died_at[0]} gets no jobs for a day: too many gangs died "
            "on it within one"
        )
        context.say("quarantined", message, gang=gang.name)
        for live in context.state.members(gang.name):
            context.requeue(live, why=message)
    context.wants_decision = context.wants_actions = True


def _died_at(context: Context, gang: LiveGang, body: Mapping[str, Any]) -> tuple[int, int] | None:
    """Node and GPU of the process that ended a gang; None if nobody knows which it was."""
    rank = int(body.get("rank", -1))
    if not 0 <= rank < len(gang.gpus):
        return None
    return context.state.machines.places(gang.gpus)[rank]


def _blame(context: Context, gang: LiveGang, joined: list[LiveJob], num_held: int) -> None:
    """Keeps the job that had just joined apart; where several had, they join one by one."""
    if len(joined) > 1:
        context.state.one_by_one.add(gang.name)
        names = ", ".join(live.name for live in joined)
        context.say(
            "quarantined",
            f"gang {gang.name} ran out of memory in the first round of {names}: they join one by "
            "one, to find the one at fault",
            gang=gang.name,
        )
        return
    for live in joined:
        if num_held > 1 and not live.alone:
            _set_apart(context, live, f"made gang {gang.name} run out of memory in its first round")
        else:
            _needs_more(context, live, gang)


def _set_apart(context: Context, live: LiveJob, why: str, *, on_trial: bool = False) -> None:
    """Lets a job train in a gang of its own; one on trial until it has shown that it is well."""
    live.alone, live.deaths, live.trial_saves = True, 0, _TRIAL_SAVES if on_trial else 0
    live.was_tried |= on_trial
    context.remember(live)
    until = f"until {_TRIAL_SAVES} checkpoints" if on_trial else "from now on"
    context.say(
        "quarantined",
        f"job {live.name!r} {why}: it trains alone {until}, and the others go on without it",
        job=live.id,
    )
    context.requeue(live, why=why)


def saved_alone(context: Context, live: LiveJob) -> None:
    """Counts a checkpoint of a job on trial; behind the last one it may train in company again."""
    live.trial_saves -= 1
    if live.trial_saves == 0:
        live.alone = False
    context.remember(live)
    if not live.alone:
        why = f"has saved {_TRIAL_SAVES} checkpoints alone"
        context.say(
            "trusted", f"job {live.name!r} {why}: it may train beside others again", job=live.id
        )
        context.requeue(live, why=why)


def _needs_more(context: Context, live: LiveJob, gang: LiveGang) -> None:
    """Gives a job that is too large for its GPUs twice as many, or fails it."""
    most = context.state.machines.shape.num_gpus
    wanted = 2 * (len(gang.gpus) or live.num_gpus)
    if wanted > most:
        assert live.load is not None, f"job {live.id} must be validated before it trains"
        context.fail(
            live,
            f"job {live.name!r} must fit into the memory of {len(gang.gpus)} GPUs, got none left "
            f"in its first round, and the cluster has {most}: lower max_seq_len, now "
            f"{live.load.lengths.longest} tokens, or lora.rank",
        )
        return
    live.num_gpus, live.alone = wanted, True
    context.remember(live)
    context.say(
        "quarantined",
        f"job {live.name!r} ran out of memory alone on {len(gang.gpus)} GPUs: it waits for "
        f"{wanted}",
        job=live.id,
    )
    context.requeue(live, why=f"waits for {wanted} GPUs")


def count_death(context: Context, held: list[LiveJob], reason: str) -> None:
    """Parts jobs whose gangs die again and again, and fails the one that does so alone."""
    for live in held:
        live.deaths += 1
        context.remember(live)
        if live.deaths < context.settings.max_deaths:
            continue
        if len(held) > 1:
            why = f"was in {live.deaths} gangs that died before it made a step"
            _set_apart(context, live, why, on_trial=not live.was_tried)
        else:
            context.fail(
                live,
                f"job {live.name!r} must not end the process that trains it, got "
                f"{live.deaths} deaths before it made a step, the last one: {reason}",
            )


def wait_for_start(context: Context, gang: LiveGang, held: list[LiveJob]) -> None:
    """Starts a gang again at once, and later each time if it dies without a step."""
    deaths = max([live.deaths + live.kills for live in held], default=0)
    wait_s = min(_LONGEST_WAIT_S, 2.0**deaths - 2.0) if deaths else 0.0
    now_s, starts_from = context.clock(), context.state.starts_from
    starts_from[gang.name] = now_s + wait_s
    context.state.starts_from = {name: at_s for name, at_s in starts_from.items() if at_s > now_s}
