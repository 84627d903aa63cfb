"""Asks the policy: on a snapshot, in a thread; what changed meanwhile makes its answer void."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.policy import Changes, Decision, RegroupCost, Rules
from tlora_megatron.scheduler.queue import WaitingQueue
from tlora_megatron.scheduler.registry import make_policy
from tlora_megatron.service.control.desk import Desk
from tlora_megatron.service.control.reasons import action_of, pause_of
from tlora_megatron.service.control.regrouping import Regrouping, bundles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """The question to a policy, and the time of asking."""

    now_s: float
    queue: WaitingQueue
    cluster: ClusterState
    changes: Changes
    cost: RegroupCost


class Deciding:
    """Decides what should run, when something has changed and at least every tick."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._regrouping = Regrouping(desk.settings, desk.pricing.speeds)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="decide")
        self._asked: tuple[_Question, Future[list[Decision]]] | None = None
        self._asked_quotas: dict[str, int] = {}
        self._wanted_s: float | None = None
        self._last_s = float("-inf")
        self.seconds: list[float] = []
        """Seconds that the last decisions took."""

    def close(self) -> None:
        """Ends the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def forget(self) -> None:
        """Drops what was asked: the books that the answer would speak of are made anew."""
        self._asked = None

    def due_s(self) -> float:
        """When a decision is due, if nothing more happens."""
        if self._asked is not None:
            return self._desk.clock()
        tick_s = self._last_s + self._desk.settings.tick_s
        if self._wanted_s is None:
            return tick_s
        return min(tick_s, self._wanted_s + self._desk.settings.coalesce_s)

    def step(self) -> None:
        """Takes an answer that is there; asks if it is time."""
        desk, now_s = self._desk, self._desk.clock()
        if self._asked is not None:
            if self._asked[1].done():
                self._take()
            return
        if desk.wants_decision and self._wanted_s is None:
            self._wanted_s = now_s
        desk.wants_decision = False
        if now_s < self.due_s():
            return
        self._last_s, self._wanted_s = now_s, None
        self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        books = self._desk.books
        if books.set_aside.sweep(now_s):
            books.fleet.changes.freed = True
        if books.end_late_pauses(now_s):
            books.fleet.changes.freed = True  # others may have the GPUs that were kept for them
        quotas = self._quotas()
        if quotas != self._asked_quotas:
            books.fleet.changes.freed = True  # policies remember what they have refused
        self._asked_quotas = quotas
        if not len(books.queue) and not books.fleet.changes.freed:
            books.fleet.changes.take()
            return
        question = _Question(
            now_s=now_s,
            queue=books.queue.copy(),
            cluster=_copy(books.fleet.state, quotas),
            changes=books.fleet.changes.take(),
            cost=replace(self._desk.cost, weights_bytes=self._desk.pricing.weights_bytes),
        )
        if self._desk.settings.decide_in_thread:
            self._asked = (question, self._threads.submit(self._answer, question))
            return
        answer: Future[list[Decision]] = Future()
        answer.set_result(self._answer(question))
        self._asked = (question, answer)
        self._take()

    def _quotas(self) -> dict[str, int]:
        """Most GPUs of tenants, read anew each time: a smaller quota takes nobody's GPUs away."""
        limits = self._desk.store.tenants.all_limits()
        return {tenant: own.gpus for tenant, own in limits.items() if own.gpus is not None}

    def _answer(self, question: _Question) -> list[Decision]:
        settings = self._desk.settings
        rules = Rules(
            lookahead=settings.lookahead,
            max_group_size=settings.max_group_size,
            cost=question.cost,
        )
        policy = make_policy(settings.policy, self._desk.pricing.speeds, rules)
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
        self._desk.tallies["decide"].add(self.seconds[-1])
        if not decisions:
            return
        groups = question.cluster.groups
        fresh = [
            bundle
            for bundle in bundles(decisions, groups)
            if self._is_fresh(bundle, question) and self._can_be_formed(bundle)
        ]
        fitting = [decision for bundle in fresh for decision in bundle]
        admitted = self._regrouping.admitted(
            fitting, groups, question.queue, question.cost, self._desk.clock()
        )
        self._desk.held_back = tuple(self._regrouping.held_back)
        if len(admitted) < len(decisions):
            self._ask_again(question)
        if admitted:
            self._carry_out(admitted, question)
            self._go_on(question)
        if len(fitting) < len(decisions):
            self._desk.wants_decision = True

    def _go_on(self, question: _Question) -> None:
        """Asks about jobs behind those that a decision looks at, while decisions place some."""
        books = self._desk.books
        if len(question.queue) > self._desk.settings.lookahead:
            books.fleet.changes.arrived.update(
                index for index in question.changes.arrived if index in books.queue
            )
            self._desk.wants_decision = True

    def _is_fresh(self, bundle: Sequence[Decision], question: _Question) -> bool:
        """True if nothing that the decisions rest on has changed since they were asked for."""
        books = self._desk.books
        state = books.fleet.state
        old: set[int] = set()
        for decision in bundle:
            for number in decision.dissolve:
                now, then = state.groups.get(number), question.cluster.groups[number]
                if now is None or [m.job.index for m in now.members] != [
                    m.job.index for m in then.members
                ]:
                    return False
                old.update(now.gpus)
        gone = {m.job.index for d in bundle for n in d.dissolve for m in state.groups[n].members}
        size = state.shape.gpus_per_node
        return all(
            (index in gone or index in books.queue)
            for decision in bundle
            for index in decision.members
        ) and all(
            gpu in old or gpu in state.free.in_node(gpu // size)
            for decision in bundle
            for gpu in decision.gpus
        )

    def _can_be_formed(self, bundle: Sequence[Decision]) -> bool:
        """True if each group is of one base and fits the memory, as far as is known now."""
        refused = [d for d in bundle if not self._desk.books.can_form(d)]
        for decision in refused:
            names = ", ".join(self._desk.books.numbers[i].name for i in decision.members)
            logger.warning(
                "a decision is not carried out: %s do not train on one base in the "
                "memory of %d GPUs any more",
                names,
                len(decision.gpus),
            )
        return not refused

    def _ask_again(self, question: _Question) -> None:
        """Keeps as news what was held back, so that the next decision looks at it again."""
        books = self._desk.books
        books.fleet.changes.freed = True
        books.fleet.changes.arrived.update(
            index for index in question.changes.arrived if index in books.queue
        )
        books.fleet.changes.regrouped.update(
            number for number in question.changes.regrouped if number in books.fleet.state.groups
        )

    def _carry_out(self, decisions: Sequence[Decision], question: _Question) -> None:
        desk = self._desk
        freed = desk.books.fleet.changes.freed
        actions = self._pauses(decisions, question)
        groups = desk.books.carry_out(decisions, desk.clock(), question.cost)
        desk.books.fleet.changes.freed = freed
        snapshot = {
            "waiting": len(question.queue),
            "groups": len(question.cluster.groups),
            "held_back": list(desk.held_back),
        }
        actions += [
            {
                "gang": desk.books.names[group.number],
                "gpus": list(group.gpus),
                "jobs": [desk.books.numbers[m.job.index].id for m in group.members],
                **action_of(group, question.cluster.groups.values()),
            }
            for group in groups
        ]
        why = f"{desk.settings.policy}: {len(groups)} groups formed in {self.seconds[-1]:.3f} s"
        touched = {index for d in decisions for index in (*d.members, *d.pause)}
        with desk.store.transaction():
            desk.store.decisions.add(snapshot, actions, why)
            for index in sorted(touched):
                desk.note_pause(desk.books.numbers[index])
        desk.wants_actions = True

    def _pauses(self, decisions: Sequence[Decision], question: _Question) -> list[dict[str, Any]]:
        """Describes the pauses that decisions make, before they are carried out."""
        books = self._desk.books
        pausing = {index for decision in decisions for index in decision.pause}
        numbers = {number for decision in decisions for number in decision.dissolve}
        groups = [question.cluster.groups[number] for number in sorted(numbers)]
        return [
            {
                "gang": books.names[group.number],
                "gpus": list(group.gpus),
                "jobs": [books.numbers[m.job.index].id for m in group.members],
                **pause_of(group),
            }
            for group in groups
            if any(member.job.index in pausing for member in group.members)
        ]


def _copy(state: ClusterState, quotas: Mapping[str, int]) -> ClusterState:
    return ClusterState(
        shape=state.shape,
        free=state.free.copy(),
        groups=dict(state.groups),
        quotas=quotas,
        tenant_gpus=dict(state.tenant_gpus),
    )
