"""How often something was done, and how long it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Tally:
    """Counts one kind of work since the controller started."""

    count: int = 0
    sum_s: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Notes one more."""
        self.count += 1
        self.sum_s += seconds
        self.last_s = seconds
        self.longest_s = max(self.longest_s, seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, in microseconds' precision."""
        return {name: round(value, 6) for name, value in asdict(self).items()}
