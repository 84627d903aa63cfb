"""Recovers: from a controller that is gone, from gangs that die or hang, from machines that leave.

A new controller adopts gangs that run with their jobs, ends gangs that the store does not know,
lets jobs of lost gangs wait, and posts commands again. A gang that died starts again, without the
job that made it run out of memory. No job is lost: each goes on from its last checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tlora_megatron.service.control.actions import Phase
from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.executor import Executor
from tlora_megatron.service.control.pricing import DAY_S, Machines
from tlora_megatron.service.control.records import GangMember, LiveGang, LiveJob, live_job, plan_of
from tlora_megatron.service.control.state import SchedulerState
from tlora_megatron.service.messages import Command
from tlora_megatron.service.store import Gang, GangState, JobState, Snapshot
from tlora_megatron.service.store.leases import MARGIN_S

_STATES: Mapping[GangState, Literal["starting", "running", "stopping"]] = {
    GangState.STARTING: "starting",
    GangState.RUNNING: "running",
    GangState.STOPPING: "stopping",
}
_LONGEST_WAIT_S = 60.0
_TIDY_S = 3600.0
_TRIAL_SAVES = 3
"""Checkpoints that a job makes alone before it is trusted again, once; they are a minute apart."""


def take_over(context: Context) -> int:
    """Rebuilds the state from the store and the engine; returns the number of the last event."""
    snapshot = context.store.load()
    machines = Machines.of(context.engine.nodes())
    context.state = SchedulerState(machines, context.pricing, first_name=snapshot.last_event)
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
        _count(context, held, reason)
    _wait(context, gang, held)
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


def _count(context: Context, held: list[LiveJob], reason: str) -> None:
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


def _wait(context: Context, gang: LiveGang, held: list[LiveJob]) -> None:
    """Starts a gang again at once, and later each time if it dies without a step."""
    deaths = max([live.deaths + live.kills for live in held], default=0)
    wait_s = min(_LONGEST_WAIT_S, 2.0**deaths - 2.0) if deaths else 0.0
    now_s, starts_from = context.clock(), context.state.starts_from
    starts_from[gang.name] = now_s + wait_s
    context.state.starts_from = {name: at_s for name, at_s in starts_from.items() if at_s > now_s}


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
        self._executor.renew()
        return self._machines()

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
            _count(context, held, f"its gang {why}")
            _wait(context, gang, held)

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
