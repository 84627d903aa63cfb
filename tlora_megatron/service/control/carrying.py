"""Carries out actions: what is written in one transaction is then done, in the order written.

A command, lease or start that is on the disk and was not done is done by the next controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tlora_megatron.service.control.actions import Action, ActionKind, Target, next_actions
from tlora_megatron.service.control.books.live import LiveGang, LiveJob, Seat
from tlora_megatron.service.control.books.orders import gang_spec, job_order
from tlora_megatron.service.control.desk import Desk
from tlora_megatron.service.home import Lease, make_folder, write_lease
from tlora_megatron.service.store import GangState, JobState, LeaseHeld

MAKES_ROOM = "it makes room for shorter work"
"""Why a job leaves its gang that a decision has paused."""
_RENEWALS = 10
"""Signs of life in the time of a lease."""


class Carrying:
    """Makes gangs what the books say they should be."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def act(self) -> None:
        """Takes all actions that are possible now."""
        desk = self._desk
        now_s = desk.clock()
        if not desk.wants_actions and now_s < desk.acts_at_s:
            return
        desk.wants_actions, desk.acts_at_s = False, self._later_s(now_s)
        shares = desk.engine.shares_gpus
        targets = {target.gang: target for target in desk.books.targets(now_s, shares=shares)}
        gangs = [gang.now(now_s) for gang in desk.books.gangs.values()]
        actions = next_actions(list(targets.values()), gangs, idle_keep_s=desk.settings.idle_keep_s)
        actions = [action for action in actions if action.kind != "keep_warm"]
        if actions:
            with desk.store.transaction():
                for action in actions:
                    self._CARRY[action.kind](self, action, targets)
        self.send()

    def _later_s(self, now_s: float) -> float:
        """When a gang has gathered its first jobs, or has waited to start again."""
        books = self._desk.books
        times = [gang.gathers_until_s for gang in books.gangs.values()]
        times += books.starts_from.values()
        return min((at_s for at_s in times if at_s > now_s), default=math.inf)

    def send(self) -> None:
        """Does what was written: leases before the commands that need them, then starts."""
        desk = self._desk
        for job, gang, epoch, lease in desk.leases:
            folder = make_folder(desk.home.job(job))
            write_lease(folder, Lease(gang=gang, epoch=epoch, lease=lease))
        desk.leases.clear()
        for spec in desk.starts:
            desk.engine.start(spec)
        desk.starts.clear()
        for command in desk.posts:
            if command.gang in desk.books.gangs:
                desk.engine.post(command)
        desk.posts.clear()

    def renew(self) -> None:
        """Gives a sign of life to gangs that were told nothing for a while."""
        desk, now_s = self._desk, self._desk.clock()
        every_s = desk.settings.lease_s / _RENEWALS
        late = [
            gang
            for gang in desk.books.gangs.values()
            if gang.state == "running" and now_s - gang.spoken_s >= every_s
        ]
        if late:
            with desk.store.transaction():
                for gang in late:
                    desk.command(gang, "renew")
            self.send()

    # One for each kind of action, inside the transaction

    def _start(self, action: Action, targets: Mapping[str, Target]) -> None:
        desk, target = self._desk, targets[action.gang]
        members = [desk.books.jobs[job] for job in target.members]
        pool = members[0].pool
        loads = [live.load for live in members if live.load is not None]
        plan = desk.pricing.plan(pool, loads, len(target.gpus))
        epoch = desk.store.gangs.next_epoch(target.gang)
        spec = gang_spec(
            name=target.gang,
            epoch=epoch,
            base_model=desk.pricing.section(pool),
            plan=plan,
            gpus=desk.books.machines.places(target.gpus),
            root=desk.home.root,
            settings=desk.settings,
        )
        ref = {"pool": pool} | ({"one_by_one": True} if target.one_by_one else {})
        desk.store.gangs.add(spec, engine_ref=ref)
        now_s = desk.clock()
        desk.books.gangs[target.gang] = LiveGang(
            name=target.gang,
            epoch=epoch,
            pool=pool,
            gpus=target.gpus,
            plan=plan,
            state="starting",
            since_s=now_s,
            heard_s=now_s,
            idle_since_s=now_s,
            lease_until_s=now_s + spec.lease_s,
            spoken_s=now_s,
        )
        desk.starts.append(spec)

    def _prepare(self, action: Action, targets: Mapping[str, Target]) -> None:
        desk, gang, live = self._desk, *self._parties(action)
        try:
            lease = desk.store.leases.grant(live.id, gang.name, gang.epoch)
        except LeaseHeld:
            # Its old gang may still write; the next tick asks again.
            return
        desk.change(live, JobState.STARTING)
        document = desk.store.jobs.document(live.id)
        order = job_order(live, document, lease.epoch, desk.settings)
        desk.leases.append((live.id, gang.name, gang.epoch, lease.epoch))
        desk.command(gang, "prepare", job=live.id, body=order)
        gang.seats[live.id] = Seat(phase="preparing", lease=lease.epoch)

    def _join(self, action: Action, targets: Mapping[str, Target]) -> None:
        desk, gang, live = self._desk, *self._parties(action)
        desk.command(gang, "join", job=live.id, body={"more": True} if action.more else {})
        body = {"phase": "joining", "epoch": gang.epoch}
        desk.store.events.add("seat", job=live.id, gang=gang.name, body=body)
        gang.seats[live.id].phase = "joining"

    def _leave(self, action: Action, targets: Mapping[str, Target]) -> None:
        desk, gang, live = self._desk, *self._parties(action)
        intent = live.intent
        body = {"save": intent != "cancel", "why": intent}
        desk.command(gang, "leave", job=live.id, body=body)
        gang.seats[live.id].phase = "leaving"
        if intent != "move" and live.state in (JobState.STARTING, JobState.RUNNING):
            desk.change(live, JobState.SAVING, why=intent)
        elif live.state is JobState.RUNNING:
            is_placed = desk.books.is_placed(live)
            why = "another gang takes it" if is_placed else MAKES_ROOM
            desk.change(live, JobState.MOVING, why=why)

    def _stop(self, action: Action, targets: Mapping[str, Target]) -> None:
        self.stop(self._desk.books.gangs[action.gang])

    def _parties(self, action: Action) -> tuple[LiveGang, LiveJob]:
        assert action.job is not None, f"{action.kind} must name a job"
        return self._desk.books.gangs[action.gang], self._desk.books.jobs[action.job]

    def stop(self, gang: LiveGang) -> None:
        """Asks a gang to save its jobs and end, inside a transaction."""
        desk = self._desk
        if gang.state == "stopping":
            return
        if gang.state == "starting" and not gang.seats:
            self.kill(gang, "nobody needs it any more")
            return
        desk.store.gangs.change(gang.name, gang.epoch, GangState.STOPPING)
        desk.command(gang, "stop", body={"save": True})
        gang.state, gang.since_s = "stopping", desk.clock()
        for job, seat in gang.seats.items():
            seat.phase = "leaving"
            live = desk.books.jobs[job]
            if live.state is JobState.RUNNING:
                desk.change(live, JobState.MOVING, why="its gang gives its GPUs back")

    def kill(self, gang: LiveGang, why: str) -> bool:
        """Ends a gang by force, inside a transaction; True with proof that it is gone."""
        desk = self._desk
        if desk.engine.kill(gang.name, gang.epoch):
            desk.gone(gang, why=why)
            return True
        desk.store.gangs.note(gang.name, gang.epoch, no_proof=why)
        if gang.state != "stopping":
            desk.store.gangs.change(gang.name, gang.epoch, GangState.STOPPING, why=why)
        gang.state, gang.since_s, gang.no_proof = "stopping", desk.clock(), why
        return False

    _CARRY: Mapping[ActionKind, Callable[[Carrying, Action, Mapping[str, Target]], None]] = {
        "start": _start,
        "prepare": _prepare,
        "join": _join,
        "leave": _leave,
        "stop": _stop,
    }
