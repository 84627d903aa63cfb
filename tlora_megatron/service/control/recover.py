"""Recovers: from a controller that is gone, from gangs that hang, from machines that leave.

A new controller adopts gangs that run with their jobs, ends gangs that the store does not know,
lets jobs of lost gangs wait, and posts commands again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

from tlora_megatron.service.control.actions import Phase
from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.deaths import count_death, wait_for_start
from tlora_megatron.service.control.executor import Executor
from tlora_megatron.service.control.pricing import DAY_S, Machines
from tlora_megatron.service.control.records import GangMember, LiveGang, LiveJob, live_job, plan_of
from tlora_megatron.service.control.state import SchedulerState
from tlora_megatron.service.messages import Command
from tlora_megatron.service.removal import tidy
from tlora_megatron.service.store import Gang, GangState, JobState, Snapshot, StoreError
from tlora_megatron.service.store.leases import MARGIN_S

logger = logging.getLogger(__name__)

_STATES: Mapping[GangState, Literal["starting", "running", "stopping"]] = {
    GangState.STARTING: "starting",
    GangState.RUNNING: "running",
    GangState.STOPPING: "stopping",
}
_TIDY_S = 3600.0


def take_over(context: Context) -> int:
    """Rebuilds the state from the store and the engine; returns the number of the last event."""
    snapshot = context.store.load()
    machines = Machines.of(context.engine.nodes())
    last_gang = context.store.gangs.last_number()
    context.state = SchedulerState(machines, context.pricing, last_gang=last_gang)
    context.posts, context.leases, context.starts, context.progress = [], [], [], {}
    for row in snapshot.jobs:
        context.state.add(live_job(row))
    with context.store.transaction():
        _add_bases(context, snapshot)
        _remember_deaths(context)
        for gang in snapshot.gangs:
            _adopt(context, gang, snapshot)
        _place(context)
    _post_again(context, snapshot)
    context.wants_actions = context.wants_decision = True
    return snapshot.last_event


def end_missing(context: Context) -> None:
    """Notes that gangs which the engine does not know are gone, after their last events."""
    running = {(info.gang, info.epoch) for info in context.engine.gangs()}
    missing = [g for g in context.state.gangs.values() if (g.name, g.epoch) not in running]
    with context.store.transaction():
        for gang in missing:
            message = f"gang {gang.name} was gone when a controller looked for it"
            context.say("rank_died", f"{message}: its jobs go on elsewhere", gang=gang.name)
            context.gang_ended(gang, why=message)


def _add_bases(context: Context, snapshot: Snapshot) -> None:
    """Takes up the base models of all jobs that were validated; a job without its base fails."""
    for row in snapshot.jobs:
        if row.stats and not context.pricing.has_base(row.base):
            document = context.store.jobs.document(row.id)
            try:
                context.pricing.add_base(row.base, document["base_model"])
            except (OSError, ValueError) as error:
                context.fail(
                    context.state.jobs[row.id], f"job {row.name!r} has lost its base: {error}"
                )


def _remember_deaths(context: Context) -> None:
    """Sets aside the GPUs on which gangs died again and again in the last day."""
    machines = context.state.machines
    for row in context.store.gangs.ended_since(context.clock() - DAY_S):
        at = row.engine_ref.get("died_at")
        if at is not None and machines.has([(at[0], at[1])]):
            context.state.set_aside.died(
                machines.number((at[0], at[1])),
                row.ended_at or 0.0,
                was_killed=bool(row.engine_ref.get("was_killed")),
            )


def _adopt(context: Context, row: Gang, snapshot: Snapshot) -> None:
    """Puts a gang that runs into the state, with the jobs that it holds."""
    now_s, machines = context.clock(), context.state.machines
    gang = LiveGang(
        name=row.name,
        epoch=row.epoch,
        pool=str(row.engine_ref.get("pool", "")),
        gpus=machines.numbers(row.spec.gpus) if machines.has(row.spec.gpus) else (),
        plan=plan_of(row.spec) if row.spec.parallel else None,
        state=_STATES[row.state],
        since_s=now_s,
        last_event_s=now_s,
        idle_since_s=now_s,
        lease_until_s=row.lease_until,
        last_event=row.heard,
        no_proof=row.engine_ref.get("no_proof"),
    )
    if row.engine_ref.get("one_by_one"):
        context.state.one_by_one.add(gang.name)
    commands = [c for c in snapshot.commands if (c.gang, c.epoch) == (row.name, row.epoch)]
    for lease in snapshot.leases:
        if (lease.gang, lease.gang_epoch) == (row.name, row.epoch):
            live = context.state.jobs.get(lease.job)
            if live is not None:
                phase = _phase(context, live, gang, commands)
                gang.members[live.id] = GangMember(phase=phase, lease=lease.epoch)
    context.state.gangs[gang.name] = gang


def _phase(context: Context, live: LiveJob, gang: LiveGang, commands: Sequence[Command]) -> Phase:
    """Where a job stands in a gang, by its state and what was written about it."""
    waiting = [command.kind for command in commands if command.job == live.id]
    leaves = live.state in (JobState.SAVING, JobState.MOVING)
    if leaves or gang.state == "stopping" or "leave" in waiting:
        return "leaving"
    if live.state is JobState.RUNNING:
        return "training"
    events = context.store.events.after(0, job=live.id, gang=gang.name, kinds=["seat"])
    phases = [event.body["phase"] for event in events if event.body["epoch"] == gang.epoch]
    if not phases or "prepare" in waiting:
        return "preparing"
    return "joining" if phases[-1] == "joining" else "prepared"


def _place(context: Context) -> None:
    """Gives every job its place: in its gang, in the queue, or nowhere."""
    state = context.state
    for gang in state.gangs.values():
        staying = [
            state.jobs[job]
            for job, member in gang.members.items()
            if member.phase != "leaving" and state.jobs[job].intent == "move"
        ]
        if gang.state != "stopping" and gang.gpus:
            state.adopt(gang, staying, context.clock())
    for live in list(state.jobs.values()):
        if live.pause is not None:  # it waits, or still leaves its gang, as it did before
            if live.intent == "move" and live.load is not None and not state.is_placed(live):
                context.enqueue(live)
                state.pause_again(live)
            context.note_pause(live)
        if state.is_held(live):
            continue
        if live.state.is_live:
            context.vacate(live, why="its gang was gone when a controller looked for it")
        elif live.state is JobState.QUEUED and live.number not in state.queue:
            context.enqueue(live)


def _post_again(context: Context, snapshot: Snapshot) -> None:
    """Posts what was written and not carried out; leases first, since `prepare` needs them."""
    members = {(gang.name, gang.epoch): gang.members for gang in context.state.gangs.values()}
    for command in snapshot.commands:
        held = members.get((command.gang, command.epoch))
        if held is None:
            continue
        if command.job is not None and command.job in held:
            lease = held[command.job].lease
            context.leases.append((command.job, command.gang, command.epoch, lease))
        context.posts.append(command)


class Watchdog:
    """Checks gangs and machines from time to time."""

    def __init__(self, context: Context, executor: Executor) -> None:
        self._context = context
        self._executor = executor
        self._last_s = self._tidied_s = -math.inf

    def due_s(self) -> float:
        return self._last_s + self._context.settings.look_s

    def look(self) -> bool:
        """Looks if it is time; True if the cluster has changed, and the state must be rebuilt."""
        context, now_s = self._context, self._context.clock()
        if now_s < self.due_s():
            return False
        self._last_s = now_s
        context.wants_actions = True
        with context.store.transaction():
            for gang in list(context.state.gangs.values()):
                self._check(gang, now_s)
        self._strangers()
        if now_s >= self._tidied_s + _TIDY_S:
            has_more = context.store.events.forget_old()
            self._tidied_s = -math.inf if has_more else now_s
            if not has_more:
                self._tidy()
        self._executor.renew()
        return self._machines()

    def _tidy(self) -> None:
        """Removes old jobs, on a thread: deleting gigabytes takes seconds."""
        context = self._context

        def run() -> None:
            try:
                keep_s = context.settings.keep_finished_s
                tidy(context.home, context.store, keep_s, context.clock())
            except (StoreError, OSError) as error:
                logger.warning("old jobs stay for another hour: %s", error)

        thread = threading.Thread(target=run, name="tidy", daemon=True)
        thread.start()
        if not context.settings.decide_in_thread:
            thread.join()

    def _check(self, gang: LiveGang, now_s: float) -> None:
        settings = self._context.settings
        owes_events = gang.state == "starting" or (gang.state == "running" and gang.members)
        if gang.no_proof is not None:
            self._kill_again(gang, now_s)
        elif gang.state == "stopping" and now_s - gang.since_s > settings.stop_s:
            self._kill(gang, f"did not stop within {settings.stop_s:.0f} s")
        elif gang.state != "stopping" and not gang.gpus:
            self._executor.kill(gang, "one of its machines is gone")
        elif owes_events and now_s - max(gang.last_event_s, gang.since_s) > settings.hang_s:
            self._kill(gang, f"said nothing for {settings.hang_s:.0f} s")

    def end(self, name: str, why: str) -> None:
        """Ends a gang whose events have a gap, and lets it start again."""
        gang = self._context.state.gangs.get(name)
        if gang is not None and gang.no_proof is None:
            with self._context.store.transaction():
                self._kill(gang, why, what="event_lost")

    def _kill(self, gang: LiveGang, why: str, *, what: str = "hung") -> None:
        context, was = self._context, gang.state
        jobs = context.state.jobs
        held = [jobs[job] for job in gang.members if job in jobs]
        if was == "starting":
            held = context.state.members(gang.name)
        proven = self._executor.kill(gang, why)
        then = "it starts again" if proven else "its jobs wait until its lease has run out"
        context.say(what, f"gang {gang.name} {why} and was killed: {then}", gang=gang.name)
        if proven and was != "stopping":
            held = [live for live in held if live.id in jobs]
            count_death(context, held, f"its gang {why}")
            wait_for_start(context, gang, held)

    def _kill_again(self, gang: LiveGang, now_s: float) -> None:
        """Asks again whether a killed gang is gone; past its lease it can write to no job."""
        context = self._context
        if context.engine.kill(gang.name, gang.epoch):
            context.gang_ended(gang, why=str(gang.no_proof))
        elif now_s > gang.lease_until_s + MARGIN_S:
            why = f"{gang.no_proof}; there is no proof that it is gone, but its lease has run out"
            context.say("hung", f"gang {gang.name} {why}", gang=gang.name)
            context.gang_ended(gang, why=why)

    def _strangers(self) -> None:
        """Ends gangs that the store does not know."""
        context = self._context
        known = {(gang.name, gang.epoch) for gang in context.state.gangs.values()}
        for info in context.engine.gangs():
            if info.alive and (info.gang, info.epoch) not in known:
                context.engine.kill(info.gang, info.epoch)
                name = f"gang {info.gang} of epoch {info.epoch}"
                context.say("stranger", f"{name} is unknown to the store: it was killed")

    def _machines(self) -> bool:
        """Ends what ran on machines that are gone; True if the cluster is another than before."""
        context, state = self._context, self._context.state
        found = Machines.of(context.engine.nodes())
        if found == state.machines:
            return False
        gone = set(found.down) - set(state.machines.down)
        back = set(state.machines.down) - set(found.down)
        with context.store.transaction():
            for gang in list(state.gangs.values()):
                if not state.machines.nodes_of(gang.gpus).isdisjoint(gone):
                    self._executor.kill(gang, "one of its machines is gone")
            for node in sorted(gone):
                context.say("node_down", f"machine {node} is gone: its jobs go on elsewhere")
            for node in sorted(back):
                context.say("node_up", f"machine {node} is back")
        return True
