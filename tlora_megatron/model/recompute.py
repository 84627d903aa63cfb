"""Recompute: the part of a micro-batch that backward computes again, and its choice by rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import get_args

from tlora_megatron.config.schema import Recompute

RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
"""All of them, the one that computes least again first."""


@dataclass(frozen=True, slots=True)
class RecomputeTable:
    """The recompute of every micro-batch of a run, by its rows.

    The last entry holds every micro-batch that is longer than it says, too: nothing saves more.
    """

    most_rows: tuple[tuple[Recompute, int], ...]
    """Recomputes, and the most rows of a micro-batch (over its context-parallel ranks) that each
    has memory for; what computes least again comes first."""

    def __post_init__(self) -> None:
        rows = [most for _, most in self.most_rows]
        if not rows or rows[0] < 1 or any(a >= b for a, b in itertools.pairwise(rows)):
            raise ValueError(f"rows of a recompute table must ascend from 1, got {self.most_rows}")

    def of(self, rows: int) -> Recompute:
        """Returns the recompute of a micro-batch of `rows` rows."""
        return next((name for name, most in self.most_rows if rows <= most), self.most_rows[-1][0])

    def room_around(self, rows: int) -> int:
        """Returns the most rows of a micro-batch around so many that needs no more recompute."""
        return next((most for _, most in self.most_rows if rows <= most), rows)

    def of_share(self, size: int, cp_size: int) -> RecomputeTable:
        """Returns the table of micro-batches that only some context-parallel ranks share."""
        rows = [(name, max(1, most * size // cp_size)) for name, most in self.most_rows]
        return RecomputeTable(tuple(rows))

    @property
    def line(self) -> str:
        """The table as users read it: `none to 6,144 rows, selective to 12,288, full beyond`."""
        *lighter, (last, _) = self.most_rows
        if not lighter:
            return f"{last} for all micro-batches"
        parts = [f"{name} to {most:,}" for name, most in lighter]
        parts[0] += " rows"
        return ", ".join([*parts, f"{last} beyond"])
