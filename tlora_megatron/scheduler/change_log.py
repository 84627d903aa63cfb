"""Collects what happens between two decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlora_megatron.scheduler.policy import Changes


@dataclass(kw_only=True, slots=True)
class ChangeLog:
    """Records what happens since the last decision; its fields are those of `Changes`."""

    arrived: set[int] = field(default_factory=set)
    regrouped: set[int] = field(default_factory=set)
    freed: bool = True

    def take(self) -> Changes:
        """Returns the changes so far and empties the log."""
        changes = Changes(
            arrived=frozenset(self.arrived), regrouped=frozenset(self.regrouped), freed=self.freed
        )
        self.arrived.clear()
        self.regrouped.clear()
        self.freed = False
        return changes
