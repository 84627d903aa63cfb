"""Counts the plans that a search left out, by reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.memory import MemoryUse
from tlora_megatron.planner.hardware import HardwareProfile

_GIB = 2.0**30
_MEMORY = "memory, "
"""Begins the kinds of plans that need more memory than there is."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Plans that were left out for one reason."""

    reason: str
    count: int
    example: Plan
    """The plan that missed by least."""


class Drops:
    """Counts plans by the reason they were dropped."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, tuple[float, str, Plan]] = {}

    def add(self, kind: str, reason: str, plan: Plan, excess: float = 0.0) -> None:
        """Counts a plan; the example of a kind is the plan that missed by least."""
        self._counts[kind] += 1
        if kind not in self._examples or excess < self._examples[kind][0]:
            self._examples[kind] = (excess, reason, plan)

    def add_for_memory(self, plan: Plan, memory: MemoryUse, hardware: HardwareProfile) -> None:
        """Counts a plan that needs more memory than there is."""
        total, largest = memory.total_bytes, memory.binding.replace("_", " ")
        kind = f"{_MEMORY}{largest}"
        if kind in self._examples and total >= self._examples[kind][0]:
            self._counts[kind] += 1  # a search drops many, and says why once
            return
        need, have = total / _GIB, hardware.memory_bytes / _GIB
        reason = f"memory: at least {need:.1f} GiB of {have:.1f} GiB, most of it {largest}"
        self.add(kind, reason, plan, total)

    def least_memory(self) -> tuple[float, Dropped] | None:
        """The bytes of the plan that missed the memory by least, and the plan; None without any."""
        missed = [kind for kind in self._examples if kind.startswith(_MEMORY)]
        if not missed:
            return None
        kind = min(missed, key=lambda kind: self._examples[kind][0])
        need, reason, plan = self._examples[kind]
        return need, Dropped(reason, self._counts[kind], plan)

    def result(self) -> tuple[Dropped, ...]:
        """All reasons, the most frequent first."""
        return tuple(
            Dropped(self._examples[kind][1], count, self._examples[kind][2])
            for kind, count in self._counts.most_common()
        )
