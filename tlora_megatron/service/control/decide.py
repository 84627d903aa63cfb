"""Asks the policy what should run, on a snapshot and in a thread, and weighs its answer.

What has changed meanwhile makes an answer void. A decision that moves or resizes running groups
must gain more than its pause costs, and moves are few; jobs may always start, or join a group where
it is. Bounds are the policy's; nothing here breaks one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tlora_megatron.scheduler.fleet import Parts, formed
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policy import Changes, ClusterState, Decision, RegroupCost, Rules
from tlora_megatron.scheduler.queue import Group, Waiting, WaitingQueue
from tlora_megatron.scheduler.registry import WEIGH_MOVES, make_policy
from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.show import action_of, pause_of
from tlora_megatron.service.settings import Settings

logger = logging.getLogger(__name__)
_MINUTE_S = 60.0
_LONGEST_DWELL_S = 1800.0
"""Gains are counted no longer than this: what will arrive by then is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """The question to a policy, and the time of asking."""

    now_s: float
    queue: WaitingQueue
    cluster: ClusterState
    changes: Changes
    cost: RegroupCost
    held: frozenset[int]
    """Groups that may not move now."""


class Decider:
    """Decides what should run, when something has changed and at least every tick."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._limiter = MoveLimiter(context.settings, context.pricing.speeds)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="decide")
        self._asked: tuple[_Question, Future[list[Decision]]] | None = None
        self._asked_quotas: dict[str, int] = {}
        self._wanted_s: float | None = None
        self._last_s = float("-inf")
        self.seconds: list[float] = []
        """Seconds that the last decisions took."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def forget(self) -> None:
        """Drops what was asked: the answer would be about a state that is gone."""
        self._asked = None

    def due_s(self) -> float:
        """When a decision is due, if nothing more happens."""
        if self._asked is not None:
            return self._context.clock()
        tick_s = self._last_s + self._context.settings.tick_s
        if self._wanted_s is None:
            return tick_s
        return min(tick_s, self._wanted_s + self._context.settings.coalesce_s)

    def step(self) -> None:
        """Takes an answer that is there; asks if it is time."""
        context, now_s = self._context, self._context.clock()
        if self._asked is not None:
            if self._asked[1].done():
                self._take()
            return
        if context.wants_decision and self._wanted_s is None:
            self._wanted_s = now_s
        context.wants_decision = False
        if now_s < self.due_s():
            return
        self._last_s, self._wanted_s = now_s, None
        self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        state = self._context.state
        if state.set_aside.sweep(now_s):
            state.fleet.changes.freed = True
        state.fleet.end_late_pauses(state.queue, now_s)
        # Read each time; a smaller quota takes no GPUs away.
        limits = self._context.store.tenants.all_limits()
        quotas = {tenant: own.gpus for tenant, own in limits.items() if own.gpus is not None}
        if quotas != self._asked_quotas:
            state.fleet.changes.freed = True  # policies remember what they have refused
        self._asked_quotas = quotas
        if not len(state.queue) and not state.fleet.changes.freed:
            state.fleet.changes.take()
            return
        cluster = state.fleet.cluster
        changes = state.fleet.changes.take()
        held = self._limiter.held(cluster.groups, now_s)
        state.fleet.changes.freed = bool(held)  # asked about again when they may move
        question = _Question(
            now_s=now_s,
            queue=state.queue.copy(),
            cluster=replace(
                cluster,
                free=cluster.free.copy(),
                groups=dict(cluster.groups),
                quotas=quotas,
                tenant_gpus=dict(cluster.tenant_gpus),
            ),
            changes=changes,
            held=held,
            cost=replace(self._context.cost, weights_bytes=self._context.pricing.weights_bytes),
        )
        if self._context.settings.decide_in_thread:
            self._asked = (question, self._threads.submit(self._answer, question))
            return
        answer: Future[list[Decision]] = Future()
        answer.set_result(self._answer(question))
        self._asked = (question, answer)
        self._take()

    def _answer(self, question: _Question) -> list[Decision]:
        settings = self._context.settings
        rules = Rules(
            lookahead=settings.lookahead,
            max_group_size=settings.max_group_size,
            cost=question.cost,
            held=question.held,
        )
        policy = make_policy(settings.policy, self._context.pricing.speeds, rules)
        begin = time.perf_counter()
        decisions = policy.decide(
            question.now_s, question.queue, question.cluster, question.changes
        )
        self.seconds = [*self.seconds[-999:], time.perf_counter() - begin]
        return decisions

    def _take(self) -> None:
        assert self._asked is not None, "an answer must have been asked for"
        question, answer = self._asked
        self._asked = None
        decisions = answer.result()
        self._context.tallies["decide"].add(self.seconds[-1])
        if not decisions:
            return
        groups = question.cluster.groups
        fresh = [
            bundle
            for bundle in bundles(decisions, groups)
            if self._is_fresh(bundle, question) and self._can_be_formed(bundle)
        ]
        fitting = [decision for bundle in fresh for decision in bundle]
        admitted = self._limiter.admitted(
            fitting, groups, question.queue, question.cost, self._context.clock()
        )
        self._context.held_back = tuple(self._limiter.held_back)
        if len(admitted) < len(decisions):
            self._ask_again(question)
        if admitted:
            self._carry_out(admitted, question)
            if len(question.queue) > self._context.settings.lookahead:
                # While decisions place some jobs, those behind them are asked about.
                self._keep_arrivals(question)
                self._context.wants_decision = True
        if len(fitting) < len(decisions):
            self._context.wants_decision = True

    def _keep_arrivals(self, question: _Question) -> None:
        """Keeps as news which jobs have arrived and still wait."""
        state = self._context.state
        state.fleet.changes.arrived.update(
            index for index in question.changes.arrived if index in state.queue
        )

    def _is_fresh(self, bundle: Sequence[Decision], question: _Question) -> bool:
        """True if nothing that the decisions rest on has changed since they were asked for."""
        state = self._context.state
        cluster = state.fleet.cluster
        old: set[int] = set()
        for decision in bundle:
            for number in decision.dissolve:
                now, then = cluster.groups.get(number), question.cluster.groups[number]
                if now is None or [m.job.index for m in now.members] != [
                    m.job.index for m in then.members
                ]:
                    return False
                old.update(now.gpus)
        gone = {m.job.index for d in bundle for n in d.dissolve for m in cluster.groups[n].members}
        size = cluster.shape.gpus_per_node
        return all(
            (index in gone or index in state.queue)
            for decision in bundle
            for index in decision.members
        ) and all(
            gpu in old or gpu in cluster.free.in_node(gpu // size)
            for decision in bundle
            for gpu in decision.gpus
        )

    def _can_be_formed(self, bundle: Sequence[Decision]) -> bool:
        """True if each group is of one base and fits the memory, as far as is known now."""
        refused = [d for d in bundle if not self._context.state.can_form(d)]
        for decision in refused:
            names = ", ".join(self._context.state.numbers[i].name for i in decision.members)
            logger.warning(
                "a decision is not carried out: %s do not train on one base in the "
                "memory of %d GPUs any more",
                names,
                len(decision.gpus),
            )
        return not refused

    def _ask_again(self, question: _Question) -> None:
        """Keeps as news what was held back, so that the next decision looks at it again."""
        state = self._context.state
        state.fleet.changes.freed = True
        self._keep_arrivals(question)
        state.fleet.changes.regrouped.update(
            number for number in question.changes.regrouped if number in state.fleet.cluster.groups
        )

    def _carry_out(self, decisions: Sequence[Decision], question: _Question) -> None:
        context = self._context
        freed = context.state.fleet.changes.freed
        actions = self._pauses(decisions, question)
        groups = context.state.carry_out(decisions, context.clock(), question.cost)
        context.state.fleet.changes.freed |= freed
        snapshot = {
            "waiting": len(question.queue),
            "groups": len(question.cluster.groups),
            "held_back": list(context.held_back),
        }
        before = question.cluster.groups.values()
        actions += [self._described(group, action_of(group, before)) for group in groups]
        why = f"{context.settings.policy}: {len(groups)} groups formed in {self.seconds[-1]:.3f} s"
        touched = {index for d in decisions for index in (*d.members, *d.pause)}
        touched |= {waiting.job.index for waiting in question.queue.paused()}
        with context.store.transaction():
            context.store.decisions.add(snapshot, actions, why)
            for index in sorted(touched):
                if index in context.state.numbers:
                    context.note_pause(context.state.numbers[index])
        context.wants_actions = True

    def _pauses(self, decisions: Sequence[Decision], question: _Question) -> list[dict[str, Any]]:
        """Describes the pauses that decisions make, before they are carried out."""
        pausing = {index for decision in decisions for index in decision.pause}
        numbers = {number for decision in decisions for number in decision.dissolve}
        groups = [question.cluster.groups[number] for number in sorted(numbers)]
        return [
            self._described(group, pause_of(group))
            for group in groups
            if any(member.job.index in pausing for member in group.members)
        ]

    def _described(self, group: Group, action: dict[str, Any]) -> dict[str, Any]:
        """An action on a group with the names of its gang and jobs."""
        state = self._context.state
        return {
            "gang": state.names[group.number],
            "gpus": list(group.gpus),
            "jobs": [state.numbers[m.job.index].id for m in group.members],
            **action,
        }


class MoveLimiter:
    """Lets decisions pass, or holds them back."""

    def __init__(self, settings: Settings, speeds: Speeds) -> None:
        self._settings = settings
        self._speeds = speeds
        self._is_weighed = settings.policy in WEIGH_MOVES
        self._moves: deque[float] = deque()
        self._moved_s: dict[tuple[int, ...], float] = {}
        """When a group was last moved to these GPUs."""
        self.held_back: list[str] = []
        """Why moves of the last decisions may not be carried out yet."""

    def admitted(
        self,
        decisions: Sequence[Decision],
        groups: Mapping[int, Group],
        queue: WaitingQueue,
        cost: RegroupCost,
        now_s: float,
    ) -> list[Decision]:
        """The decisions that may be carried out now; others may be made again later."""
        passed = []
        self.held_back = []
        for bundle in bundles(decisions, groups):
            if not any(_moves(decision, groups) for decision in bundle):
                passed += bundle
                continue
            old = [groups[number] for decision in bundle for number in decision.dissolve]
            why = None if _ousts(bundle, old, queue) else self._too_early(old, now_s)
            if (
                why is None
                and not self._is_weighed
                and not self._pays(bundle, groups, queue, cost, now_s)
            ):
                why = f"a move brings less than {self._settings.gain_over_cost:g} times its pause"
            if why is not None:
                self.held_back.append(why)
            else:
                passed += bundle
                self._moves.append(now_s)
                recent_s = now_s - self._settings.dwell_s
                self._moved_s = {gpus: s for gpus, s in self._moved_s.items() if s > recent_s}
                self._moved_s.update((decision.gpus, now_s) for decision in bundle)
        return passed

    def held(self, groups: Mapping[int, Group], now_s: float) -> frozenset[int]:
        """Groups that may not move now, for a policy that finds something else for the jobs."""
        return frozenset(n for n, group in groups.items() if self._too_early([group], now_s))

    def _too_early(self, old: Sequence[Group], now_s: float) -> str | None:
        """Why a move of groups has to wait; None if it has not."""
        while self._moves and self._moves[0] <= now_s - _MINUTE_S:
            self._moves.popleft()
        if len(self._moves) >= self._settings.regroups_per_min:
            return f"the cluster has made {len(self._moves)} moves within a minute"
        since = [self._moved_s.get(group.gpus, float("-inf")) for group in old]
        if all(now_s - moved_s >= self._settings.dwell_s for moved_s in since):
            return None
        return f"a group was moved less than {self._settings.dwell_s:g} s ago"

    def _pays(
        self,
        bundle: Sequence[Decision],
        groups: Mapping[int, Group],
        queue: WaitingQueue,
        cost: RegroupCost,
        now_s: float,
    ) -> bool:
        old = [groups[number] for decision in bundle for number in decision.dissolve]
        owner = {member.job.index: (group, member) for group in old for member in group.members}
        gain, lost, dwell_s = -sum(group.tokens_per_s for group in old), 0.0, _LONGEST_DWELL_S
        for decision in bundle:
            running = tuple(owner[index] for index in decision.members if index in owner)
            joining: tuple[Waiting, ...] = tuple(
                queue[index] for index in decision.members if index not in owner
            )
            parts = Parts(running=running, joining=joining)
            rates = self._speeds.rates(parts.kinds, len(decision.gpus))
            if rates is None:
                return False
            group = formed(
                parts, gpus=decision.gpus, rates=rates, now_s=now_s, cost=cost, number=-1
            )
            gain += rates.total
            lost += (group.ready_s - now_s) * sum(m.tokens_per_s for _, m in running)
            dwell_s = min([dwell_s, *(group.end_s(m) - group.ready_s for m in group.members)])
        return gain * dwell_s > self._settings.gain_over_cost * lost


def bundles(decisions: Sequence[Decision], groups: Mapping[int, Group]) -> list[list[Decision]]:
    """Decisions that can only be carried out together: they share members or GPUs."""
    found: list[tuple[set[object], list[Decision]]] = []
    for decision in decisions:
        ties: set[object] = {("gpu", gpu) for gpu in decision.gpus}
        ties |= {("job", index) for index in decision.members}
        for number in decision.dissolve:
            ties |= {("gpu", gpu) for gpu in groups[number].gpus}
            ties |= {("job", member.job.index) for member in groups[number].members}
        together = [entry for entry in found if not ties.isdisjoint(entry[0])]
        found = [entry for entry in found if ties.isdisjoint(entry[0])]
        own = [one for _, others in together for one in others]
        found.append((ties.union(*(entry[0] for entry in together)), [*own, decision]))
    order = {id(decision): place for place, decision in enumerate(decisions)}
    return [sorted(own, key=lambda one: order[id(one)]) for _, own in found]


def _ousts(bundle: Sequence[Decision], old: Sequence[Group], queue: WaitingQueue) -> bool:
    """True if groups give room to a job that is more urgent than all of theirs."""
    joining = [queue[i].job for decision in bundle for i in decision.members if i in queue]
    level = max([member.job.priority for group in old for member in group.members])
    return any(job.priority > level for job in joining)


def _moves(decision: Decision, groups: Mapping[int, Group]) -> bool:
    """True unless jobs only start, or join one group where it is."""
    old = [groups[number] for number in decision.dissolve]
    if not old:
        return False
    if len(old) > 1 or old[0].gpus != decision.gpus:
        return True
    return not {member.job.index for member in old[0].members} <= set(decision.members)
