"""The events of a run and their order."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum


class Kind(IntEnum):
    """Kinds of events, in the order in which those of one moment are handled."""

    GROUP = 0
    NODE_UP = 1
    NODE_DOWN = 2
    CANCEL = 3
    ARRIVAL = 4


@dataclass(kw_only=True, slots=True)
class Clock:
    """Measures the CPU time that decisions take."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)


@dataclass(kw_only=True, slots=True)
class Events:
    """A heap of events, totally ordered by (time, kind, sequence)."""

    heap: list[tuple[float, int, int, int]] = field(default_factory=list)
    pushed: int = 0

    def push(self, time_s: float, kind: Kind, what: int) -> None:
        heapq.heappush(self.heap, (time_s, int(kind), self.pushed, what))
        self.pushed += 1
