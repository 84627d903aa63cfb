"""The simulated fleet: every change is entered into the ledger, each group's end is an event."""

from __future__ import annotations

from collections.abc import Mapping

from tlora_megatron.scheduler.cluster import ClusterShape
from tlora_megatron.scheduler.fleet import Fleet
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Group, Member
from tlora_megatron.sim.events import Events, Kind
from tlora_megatron.sim.faults import Faults
from tlora_megatron.sim.ledger import Ledger


class SimulatedFleet(Fleet):
    """A fleet whose groups end by the model's speeds, or fail where a fault was drawn."""

    def __init__(
        self,
        *,
        shape: ClusterShape,
        speeds: Speeds,
        faults: Faults,
        quotas: Mapping[str, int],
        events: Events,
        ledger: Ledger,
    ) -> None:
        """Begins with all GPUs free; `events` and `ledger` are shared with the simulator."""
        super().__init__(shape=shape, speeds=speeds, quotas=quotas)
        self._faults = faults
        self._events = events
        self._ledger = ledger

    def stop_s(self, group: Group, member: Member) -> float:
        """When a member ends or fails if nothing changes."""
        fails_after = self._faults.fails_after_tokens.get(member.job.index)
        if fails_after is None:
            return group.end_s(member)
        left = member.tokens_left - (member.job.tokens - fails_after)
        return group.ready_s + max(0.0, left) / member.tokens_per_s

    def open(self, group: Group) -> None:
        """Puts a group on free GPUs, and its first end among the events."""
        super().open(group)
        stop_s = min([self.stop_s(group, member) for member in group.members])
        self._events.push(stop_s, Kind.GROUP, group.number)

    def close(self, group: Group, now_s: float) -> None:
        """Takes a group off its GPUs and enters what it trained."""
        self._ledger.close(group, now_s)
        super().close(group, now_s)
