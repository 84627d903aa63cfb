"""Starts a gang again when it has died, without the job that made it run out of memory.

No job is lost: whatever a gang held goes on from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_megatron.service.control.books.live import LiveGang, LiveJob
from tlora_megatron.service.control.desk import Desk

_LONGEST_WAIT_S = 60.0


def died(desk: Desk, gang: LiveGang, body: Mapping[str, Any]) -> None:
    """Handles the death of a gang, inside the transaction that hears of it."""
    reason = str(body.get("reason", "no reason is known"))
    out_of_memory = bool(body.get("out_of_memory"))
    told = [str(job) for job in body.get("newcomers", ())]
    newcomers = [job for job in told or sorted(gang.in_first_round) if job in gang.seats]
    starting = gang.state == "starting"
    seat = None if out_of_memory else _seat(desk, gang, body)
    held = desk.gone(gang, why=reason, died_at=seat)
    if starting:
        # Nobody had joined; the jobs that wait for it may be what it cannot start for.
        held = desk.books.members(gang.name)
    names = ", ".join(live.name for live in held) or "none"
    what = "out_of_memory" if out_of_memory else "rank_died"
    desk.say(
        what,
        f"gang {gang.name} died ({reason}); it starts again, and its jobs go on from their last "
        f"checkpoints: {names}",
        gang=gang.name,
    )
    held = [live for live in held if live.id in desk.books.jobs]
    if out_of_memory and newcomers:
        _blame(desk, gang, [live for live in held if live.id in newcomers], len(held))
    else:
        _count(desk, held, reason)
    _wait(desk, gang, held)
    if seat is not None and desk.books.set_aside.died(
        desk.books.machines.number(seat), desk.clock()
    ):
        _leave_seat(desk, gang, seat)
    desk.wants_decision = desk.wants_actions = True


def _seat(desk: Desk, gang: LiveGang, body: Mapping[str, Any]) -> tuple[int, int] | None:
    """Node and GPU of the process that ended a gang; None if a signal from outside ended it."""
    rank = int(body.get("rank", -1))
    if body.get("was_killed") or not 0 <= rank < len(gang.gpus):
        return None
    return desk.books.machines.places(gang.gpus)[rank]


def _leave_seat(desk: Desk, gang: LiveGang, seat: tuple[int, int]) -> None:
    """Lets the jobs of a gang go on elsewhere, after its GPU was set aside."""
    node, gpu = seat
    message = (
        f"GPU {gpu} of machine {node} gets no jobs for a day: two gangs died by their processes on "
        "it within one"
    )
    desk.say("quarantined", message, gang=gang.name)
    for live in desk.books.members(gang.name):
        desk.place_anew(live, why=message)


def hung(desk: Desk, gang: LiveGang, held: list[LiveJob], reason: str) -> None:
    """Counts the death of a gang that was killed for its silence, after it is gone."""
    held = [live for live in held if live.id in desk.books.jobs]
    _count(desk, held, reason)
    _wait(desk, gang, held)


def _blame(desk: Desk, gang: LiveGang, newcomers: list[LiveJob], num_held: int) -> None:
    """Keeps the newcomer apart from now on; several newcomers join one by one instead."""
    if len(newcomers) > 1:
        desk.books.one_by_one.add(gang.name)
        names = ", ".join(live.name for live in newcomers)
        desk.say(
            "quarantined",
            f"gang {gang.name} ran out of memory in the first round of {names}: they join one by "
            "one, to find the one at fault",
            gang=gang.name,
        )
        return
    for live in newcomers:
        if num_held > 1 and not live.alone:
            _set_apart(desk, live, f"made gang {gang.name} run out of memory in its first round")
        else:
            _needs_more(desk, live, gang)


def _set_apart(desk: Desk, live: LiveJob, why: str) -> None:
    """Lets a job train in a gang of its own."""
    live.alone, live.deaths = True, 0
    desk.remember(live)
    desk.say(
        "quarantined",
        f"job {live.name!r} {why}: it trains alone from now on, and the others go on without it",
        job=live.id,
    )
    desk.place_anew(live, why=why)


def _needs_more(desk: Desk, live: LiveJob, gang: LiveGang) -> None:
    """Gives a job that is too large for its GPUs twice as many, or fails it."""
    most = desk.books.machines.shape.num_gpus
    wanted = 2 * (len(gang.gpus) or live.num_gpus)
    if wanted > most:
        assert live.load is not None, f"job {live.id} must be validated before it trains"
        desk.fail(
            live,
            f"job {live.name!r} must fit into the memory of {len(gang.gpus)} GPUs, got none left "
            f"in its first round, and the cluster has {most}: lower max_seq_len, now "
            f"{live.load.lengths.longest} tokens, or lora.rank",
        )
        return
    live.num_gpus, live.alone = wanted, True
    desk.remember(live)
    desk.say(
        "quarantined",
        f"job {live.name!r} ran out of memory alone on {len(gang.gpus)} GPUs: it waits for "
        f"{wanted}",
        job=live.id,
    )
    desk.place_anew(live, why=f"waits for {wanted} GPUs")


def _count(desk: Desk, held: list[LiveJob], reason: str) -> None:
    """Parts jobs whose gangs die again and again, and fails the one that does so alone."""
    for live in held:
        live.deaths += 1
        desk.remember(live)
        if live.deaths < desk.settings.max_deaths:
            continue
        if len(held) > 1:
            _set_apart(desk, live, f"was in {live.deaths} gangs that died before it made a step")
        else:
            desk.fail(
                live,
                f"job {live.name!r} must not end the process that trains it, got "
                f"{live.deaths} deaths before it made a step, the last one: {reason}",
            )


def _wait(desk: Desk, gang: LiveGang, held: list[LiveJob]) -> None:
    """Starts a gang again at once, and later each time if it dies without a step."""
    deaths = max([live.deaths for live in held], default=0)
    wait_s = min(_LONGEST_WAIT_S, 2.0**deaths - 2.0) if deaths else 0.0
    now_s, starts_from = desk.clock(), desk.books.starts_from
    starts_from[gang.name] = now_s + wait_s
    desk.books.starts_from = {name: at_s for name, at_s in starts_from.items() if at_s > now_s}
