"""Carries out actions on gangs: what is written in one transaction is then done, in that order.

A command, lease or start that is on the disk and was not done is done by the next controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tlora_megatron.service.control.actions import Action, ActionKind, Target, plan_actions
from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.records import (
    GangMember,
    LiveGang,
    LiveJob,
    gang_spec,
    job_order,
)
from tlora_megatron.service.engines.base import GangEngine
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.home import Lease, make_folder, write_lease
from tlora_megatron.service.store import GangState, JobState, LeaseHeld
from tlora_megatron.service.sweeps import sweep_of

MAKES_ROOM = "it makes room for shorter work"
"""Why a job leaves its gang that a decision has paused."""
_RENEWALS = 10
"""Signs of life in the time of a lease."""


class Executor:
    """Makes gangs what was decided that they should be."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def run(self) -> None:
        context = self._context
        now_s = context.clock()
        if not context.wants_actions and now_s < context.acts_at_s:
            return
        # A gang has then gathered its first jobs, or has waited to start again.
        times = [gang.gathers_until_s for gang in context.state.gangs.values()]
        times += context.state.starts_from.values()
        context.acts_at_s = min((at_s for at_s in times if at_s > now_s), default=math.inf)
        context.wants_actions = False
        shares = context.engine.shares_gpus
        targets = {target.gang: target for target in context.state.targets(now_s, shares=shares)}
        gangs = [gang.now(now_s) for gang in context.state.gangs.values()]
        actions = plan_actions(
            list(targets.values()), gangs, idle_keep_s=context.settings.idle_keep_s
        )
        if actions:
            with context.store.transaction():
                for action in actions:
                    self._CARRY[action.kind](self, action, targets)
        self.send()

    def send(self) -> None:
        """Does what was written: leases before the commands that need them, then starts."""
        context = self._context
        for job, gang, epoch, lease in context.leases:
            folder = make_folder(context.home.job(job))
            write_lease(folder, Lease(gang=gang, epoch=epoch, lease=lease))
        context.leases.clear()
        for spec in context.starts:
            context.engine.start(spec)
        context.starts.clear()
        for command in context.posts:
            if command.gang in context.state.gangs:
                context.engine.post(command)
        context.posts.clear()

    def renew(self) -> None:
        """Gives a sign of life to gangs that got no command for a while."""
        context, now_s = self._context, self._context.clock()
        every_s = context.settings.lease_s / _RENEWALS
        late = [
            gang
            for gang in context.state.gangs.values()
            if gang.state == "running" and now_s - gang.commanded_s >= every_s
        ]
        if late:
            with context.store.transaction():
                for gang in late:
                    context.command(gang, "renew")
            self.send()

    # One for each kind of action, inside the transaction

    def _start(self, action: Action, targets: Mapping[str, Target]) -> None:
        context, target = self._context, targets[action.gang]
        members = [context.state.jobs[job] for job in target.members]
        pool = members[0].pool
        loads = [live.load for live in members if live.load is not None]
        plan = context.pricing.base(pool).plan(loads, len(target.gpus))
        epoch = context.store.gangs.next_epoch(target.gang)
        spec = gang_spec(
            name=target.gang,
            epoch=epoch,
            base_model=context.pricing.section(pool),
            plan=plan,
            gpus=context.state.machines.places(target.gpus),
            root=context.home.root,
            settings=context.settings,
        )
        ref = {"pool": pool} | ({"one_by_one": True} if target.one_by_one else {})
        context.store.gangs.add(spec, engine_ref=ref)
        context.state.last_gang = max(context.state.last_gang, int(target.gang.removeprefix("g")))
        now_s = context.clock()
        context.state.gangs[target.gang] = LiveGang(
            name=target.gang,
            epoch=epoch,
            pool=pool,
            gpus=target.gpus,
            plan=plan,
            state="starting",
            since_s=now_s,
            last_event_s=now_s,
            idle_since_s=now_s,
            lease_until_s=now_s + spec.lease_s,
            commanded_s=now_s,
        )
        context.starts.append(spec)

    def _prepare(self, action: Action, targets: Mapping[str, Target]) -> None:
        context, gang, live = self._context, *self._parties(action)
        try:
            lease = context.store.leases.grant(live.id, gang.name, gang.epoch)
        except LeaseHeld:
            # Its old gang may still write; the next tick asks again.
            return
        context.change(live, JobState.STARTING)
        document = context.store.jobs.document(live.id)
        found = sweep_of(context.store, live.sweep) if live.sweep is not None else None
        hold_at = () if found is None else found.open_rungs(live.name)
        order = job_order(live, document, lease.epoch, context.settings, hold_at)
        context.leases.append((live.id, gang.name, gang.epoch, lease.epoch))
        context.command(gang, "prepare", job=live.id, body=order)
        gang.members[live.id] = GangMember(phase="preparing", lease=lease.epoch)

    def _join(self, action: Action, targets: Mapping[str, Target]) -> None:
        context, gang, live = self._context, *self._parties(action)
        context.command(gang, "join", job=live.id, body={"more": True} if action.more else {})
        body = {"phase": "joining", "epoch": gang.epoch}
        context.store.events.add("seat", job=live.id, gang=gang.name, body=body)
        gang.members[live.id].phase = "joining"

    def _leave(self, action: Action, targets: Mapping[str, Target]) -> None:
        context, gang, live = self._context, *self._parties(action)
        intent = live.intent
        body = {"save": intent != "cancel", "why": intent}
        context.command(gang, "leave", job=live.id, body=body)
        gang.members[live.id].phase = "leaving"
        if intent != "move" and live.state in (JobState.STARTING, JobState.RUNNING):
            context.change(live, JobState.SAVING, why=intent)
        elif live.state is JobState.RUNNING:
            is_placed = context.state.is_placed(live)
            why = "another gang takes it" if is_placed else MAKES_ROOM
            context.change(live, JobState.MOVING, why=why)

    def _stop(self, action: Action, targets: Mapping[str, Target]) -> None:
        self.stop(self._context.state.gangs[action.gang])

    def _parties(self, action: Action) -> tuple[LiveGang, LiveJob]:
        assert action.job is not None, f"{action.kind} must name a job"
        return self._context.state.gangs[action.gang], self._context.state.jobs[action.job]

    def stop(self, gang: LiveGang) -> None:
        """Asks a gang to save its jobs and end, inside a transaction."""
        context = self._context
        if gang.state == "stopping":
            return
        if gang.state == "starting" and not gang.members:
            self.kill(gang, "no job needs it any more")
            return
        context.store.gangs.change(gang.name, gang.epoch, GangState.STOPPING)
        context.command(gang, "stop", body={"save": True})
        gang.state, gang.since_s = "stopping", context.clock()
        for job, member in gang.members.items():
            member.phase = "leaving"
            live = context.state.jobs[job]
            if live.state is JobState.RUNNING:
                context.change(live, JobState.MOVING, why="its gang gives its GPUs back")

    def kill(self, gang: LiveGang, why: str) -> bool:
        """Ends a gang by force, inside a transaction; True with proof that it is gone."""
        context = self._context
        if context.engine.kill(gang.name, gang.epoch):
            context.gang_ended(gang, why=why)
            return True
        context.store.gangs.note(gang.name, gang.epoch, no_proof=why)
        if gang.state != "stopping":
            context.store.gangs.change(gang.name, gang.epoch, GangState.STOPPING, why=why)
        gang.state, gang.since_s, gang.no_proof = "stopping", context.clock(), why
        return False

    _CARRY: Mapping[ActionKind, Callable[[Executor, Action, Mapping[str, Target]], None]] = {
        "start": _start,
        "prepare": _prepare,
        "join": _join,
        "leave": _leave,
        "stop": _stop,
    }


class EngineLost(RuntimeError):
    """The engine does not answer."""


class GuardedEngine:
    """An engine's calls; they raise `EngineLost` where the engine cannot be reached."""

    def __init__(self, engine: GangEngine[Any]) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return partial(self._ask, found) if callable(found) else found

    def nodes(self) -> Sequence[NodeInfo]:
        """The machines; an engine that has lost all of them does not answer either."""
        found: Sequence[NodeInfo] = self._ask(self._engine.nodes)
        if not any(node.gpus for node in found):
            raise EngineLost("it has no machine with a GPU or worker slot")
        return found

    def _ask(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except (RuntimeError, OSError) as error:
            raise EngineLost(str(error)) from error
