"""Takes up what an earlier controller left, or a later moment of this one: rows are the state.

Gangs that run are adopted with their jobs, gangs of nobody are ended, jobs of gangs that are gone
wait again, and commands that were not carried out are posted once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from tlora_megatron.service.control.actions import Phase
from tlora_megatron.service.control.books.books import Books
from tlora_megatron.service.control.books.live import LiveGang, LiveJob, Seat
from tlora_megatron.service.control.books.machines import Machines
from tlora_megatron.service.control.books.orders import live_job, plan_of
from tlora_megatron.service.control.books.set_aside import DAY_S
from tlora_megatron.service.control.desk import Desk
from tlora_megatron.service.messages import Command
from tlora_megatron.service.store import Gang, GangState, JobState, Snapshot

_STATES: Mapping[GangState, Literal["starting", "running", "stopping"]] = {
    GangState.STARTING: "starting",
    GangState.RUNNING: "running",
    GangState.STOPPING: "stopping",
}


def take_over(desk: Desk) -> int:
    """Fills the books from the store and the engine; returns the number of the last event."""
    snapshot = desk.store.load()
    machines = Machines.of(desk.engine.nodes())
    desk.books = Books(machines, desk.pricing, first_name=snapshot.last_event)
    desk.posts, desk.leases, desk.starts, desk.progress = [], [], [], {}
    for row in snapshot.jobs:
        desk.books.add(live_job(row))
    with desk.store.transaction():
        _meet_bases(desk, snapshot)
        _remember_deaths(desk)
        for gang in snapshot.gangs:
            _adopt(desk, gang, snapshot)
        _place(desk)
    _post_again(desk, snapshot)
    desk.wants_actions = desk.wants_decision = True
    return snapshot.last_event


def bury_missing(desk: Desk) -> None:
    """Notes that gangs are gone which the engine does not know, after their last words."""
    running = {(info.gang, info.epoch) for info in desk.engine.gangs()}
    missing = [g for g in desk.books.gangs.values() if (g.name, g.epoch) not in running]
    with desk.store.transaction():
        for gang in missing:
            message = f"gang {gang.name} was gone when a controller looked for it"
            desk.say("rank_died", f"{message}: its jobs go on elsewhere", gang=gang.name)
            desk.gone(gang, why=message)


def _meet_bases(desk: Desk, snapshot: Snapshot) -> None:
    """Takes up the base models of all jobs that were validated; a job without its base fails."""
    for row in snapshot.jobs:
        if row.stats and not desk.pricing.knows(row.base):
            document = desk.store.jobs.document(row.id)
            try:
                desk.pricing.meet(row.base, document["base_model"])
            except (OSError, ValueError) as error:
                desk.fail(desk.books.jobs[row.id], f"job {row.name!r} has lost its base: {error}")


def _remember_deaths(desk: Desk) -> None:
    """Sets aside the GPUs on which gangs died again and again in the last day."""
    machines = desk.books.machines
    for row in desk.store.gangs.ended_since(desk.clock() - DAY_S):
        seat = row.engine_ref.get("died_at")
        if seat is not None and machines.has([(seat[0], seat[1])]):
            desk.books.set_aside.died(machines.number((seat[0], seat[1])), row.ended_at or 0.0)


def _adopt(desk: Desk, row: Gang, snapshot: Snapshot) -> None:
    """Puts a gang that runs into the books, with the seats of its jobs."""
    now_s, machines = desk.clock(), desk.books.machines
    gang = LiveGang(
        name=row.name,
        epoch=row.epoch,
        pool=str(row.engine_ref.get("pool", "")),
        gpus=machines.numbers(row.spec.gpus) if machines.has(row.spec.gpus) else (),
        plan=plan_of(row.spec) if row.spec.parallel else None,
        state=_STATES[row.state],
        since_s=now_s,
        heard_s=now_s,
        idle_since_s=now_s,
        lease_until_s=row.lease_until,
        heard=row.heard,
        no_proof=row.engine_ref.get("no_proof"),
    )
    if row.engine_ref.get("one_by_one"):
        desk.books.one_by_one.add(gang.name)
    commands = [c for c in snapshot.commands if (c.gang, c.epoch) == (row.name, row.epoch)]
    for lease in snapshot.leases:
        if (lease.gang, lease.gang_epoch) == (row.name, row.epoch):
            live = desk.books.jobs.get(lease.job)
            if live is not None:
                phase = _phase(desk, live, gang, commands)
                gang.seats[live.id] = Seat(phase=phase, lease=lease.epoch)
    desk.books.gangs[gang.name] = gang


def _phase(desk: Desk, live: LiveJob, gang: LiveGang, commands: Sequence[Command]) -> Phase:
    """Where a job stands in a gang, by its state and what was written about it."""
    waiting = [command.kind for command in commands if command.job == live.id]
    if gang.state == "stopping" or "leave" in waiting:
        return "leaving"
    if live.state in (JobState.SAVING, JobState.MOVING):
        return "leaving"
    if live.state is JobState.RUNNING:
        return "training"
    events = desk.store.events.after(0, job=live.id, gang=gang.name, kinds=["seat"])
    phases = [event.body["phase"] for event in events if event.body["epoch"] == gang.epoch]
    if not phases or "prepare" in waiting:
        return "preparing"
    return "joining" if phases[-1] == "joining" else "prepared"


def _place(desk: Desk) -> None:
    """Gives every job its place: in its gang, in the queue, or nowhere."""
    seated: Mapping[str, LiveGang] = {
        job: gang for gang in desk.books.gangs.values() for job in gang.seats
    }
    for gang in desk.books.gangs.values():
        staying = [
            desk.books.jobs[job]
            for job, seat in gang.seats.items()
            if seat.phase != "leaving" and desk.books.jobs[job].intent == "move"
        ]
        if gang.state != "stopping" and gang.gpus:
            desk.books.adopt(gang, staying, desk.clock())
    for live in list(desk.books.jobs.values()):
        if live.pause is not None:
            _pause_again(desk, live)
        if live.id in seated:
            continue
        if live.state.is_live:
            desk.vacate(live, why="its gang was gone when a controller looked for it")
        elif live.state is JobState.QUEUED and live.number not in desk.books.queue:
            desk.enqueue(live)


def _pause_again(desk: Desk, live: LiveJob) -> None:
    """Lets a job wait, or still leave its gang, whom a decision has paused, as it did before."""
    if live.intent == "move" and live.load is not None and not desk.books.is_placed(live):
        desk.enqueue(live)
        desk.books.pause_again(live)
    desk.note_pause(live)


def _post_again(desk: Desk, snapshot: Snapshot) -> None:
    """Posts what was written and not carried out; leases first, since `prepare` needs them."""
    seats = {(gang.name, gang.epoch): gang.seats for gang in desk.books.gangs.values()}
    for command in snapshot.commands:
        held = seats.get((command.gang, command.epoch))
        if held is None:
            continue
        if command.job is not None and command.job in held:
            lease = held[command.job].lease
            desk.leases.append((command.job, command.gang, command.epoch, lease))
        desk.posts.append(command)
