"""Weighs decisions that move or resize running groups: what is gained must outweigh the pause.

Jobs that start, or join a group where it is, always may. A group that was moved stays for a while,
and the cluster makes few moves a minute. Some policies have weighed the pause themselves. Bounds
are the policy's; nothing here breaks one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from tlora_megatron.scheduler.formation import Parts, formed
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Group, Waiting
from tlora_megatron.scheduler.policy import Decision, RegroupCost
from tlora_megatron.scheduler.queue import WaitingQueue
from tlora_megatron.scheduler.registry import WEIGH_MOVES
from tlora_megatron.service.control.settings import Settings

_MINUTE_S = 60.0
_LONGEST_DWELL_S = 1800.0
"""Nobody knows longer what will arrive."""


class Regrouping:
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
            why = self._too_early(bundle, groups, now_s)
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
                self._forget(now_s)
                self._moved_s.update((decision.gpus, now_s) for decision in bundle)
        return passed

    def _forget(self, now_s: float) -> None:
        """Drops moves that hold nothing back any more."""
        recent_s = now_s - self._settings.dwell_s
        self._moved_s = {gpus: at_s for gpus, at_s in self._moved_s.items() if at_s > recent_s}

    def _too_early(
        self, bundle: Sequence[Decision], groups: Mapping[int, Group], now_s: float
    ) -> str | None:
        """Why a move has to wait; None if it has not."""
        while self._moves and self._moves[0] <= now_s - _MINUTE_S:
            self._moves.popleft()
        if len(self._moves) >= self._settings.regroups_per_min:
            return f"the cluster has made {len(self._moves)} moves within a minute"
        old = [groups[number] for decision in bundle for number in decision.dissolve]
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


def _moves(decision: Decision, groups: Mapping[int, Group]) -> bool:
    """True unless jobs only start, or join one group where it is."""
    old = [groups[number] for number in decision.dissolve]
    if not old:
        return False
    if len(old) > 1 or old[0].gpus != decision.gpus:
        return True
    return not {member.job.index for member in old[0].members} <= set(decision.members)
