"""The speed of one data-parallel replica: what a sequence costs it, as a value in whole numbers.

The planner makes it, the packer balances rounds by it, and every process computes the same with it:
whole numbers leave no room for another rounding on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRate:
    """Predicted time that one replica takes for its part of a round.

    A sequence of x rows takes `token_ps * x + square_ps * x**2` picoseconds.
    """

    token_ps: int
    """Picoseconds a row, forward and backward, recompute included."""
    square_ps: int
    """Picoseconds a squared row of a sequence: attention."""
    fixed_ps: int = 0
    """Picoseconds a micro-batch, however many rows it has."""
    longest: int
    """Rows that one of its micro-batches may hold, and so the longest sequence it may be given."""

    def __post_init__(self) -> None:
        for name, least in (("token_ps", 1), ("square_ps", 0), ("fixed_ps", 0), ("longest", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")

    def sequence_ps(self, rows: int) -> int:
        """Picoseconds of a sequence of so many rows."""
        return (self.token_ps + self.square_ps * rows) * rows
