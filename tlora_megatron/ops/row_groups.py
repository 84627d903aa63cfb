"""The rows of a tensor grouped by adapter, for kernels and dropout."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from tlora_megatron.ops.dropout import mix32
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.host_copy import to_device

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Runs of rows, one a slot in ascending order with the null slot last; some are empty.

    Slot i owns rows `ends[i-1]:ends[i]`. It is so on every context-parallel rank: each holds its
    rows in packed order, which is the order of slots.
    """

    ends: tuple[int, ...]
    """`num_slots + 1` of them; the last is the number of rows."""
    token_index: Tensor
    """Index of each row among its job's tokens, int64 `[rows]` on the CPU."""
    dropout_keys: tuple[int, ...]
    row_budget: int
    """The number of rows that sizes of blocks and runs are chosen for: the most that a micro-batch
    of the run may have here, or an even part of them where the run has nano-batches.

    Sizes that decide the order of a sum follow from this, never from the number of rows: otherwise
    a job's bits would depend on what else is packed beside it.
    """
    exactness: Exactness | None = None
    """None = the fastest kernels."""
    cuts: tuple[int, ...] = ()
    """Rows inside a slot's run at which another portion of its job begins, ascending. Sums over
    rows go portion by portion, as if each came in a micro-batch of its own."""
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def num_slots(self) -> int:
        """Slots of adapters: all but the null slot."""
        return len(self.ends) - 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each slot."""

        def build() -> tuple[int, ...]:
            return tuple(e - b for b, e in zip((0, *self.ends[:-1]), self.ends, strict=True))

        return self.cached("lengths", build)

    @property
    def portions(self) -> tuple[tuple[int, int], ...]:
        """`(slot, rows)` of every portion in row order, of every slot at least one."""

        def build() -> tuple[tuple[int, int], ...]:
            found, cuts = [], self.cuts
            for slot, (begin, end) in enumerate(itertools.pairwise((0, *self.ends))):
                inside = cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)]
                bounds = itertools.pairwise((begin, *inside, end))
                found += [(slot, last - first) for first, last in bounds]
            return tuple(found)

        return self.cached("portions", build)

    @property
    def present_slots(self) -> tuple[int, ...]:
        """Slots with at least one row, null slot left out, ascending."""

        def build() -> tuple[int, ...]:
            return tuple(slot for slot, n in enumerate(self.lengths[:-1]) if n)

        return self.cached("present", build)

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns the value stored under `key`, building it on first use."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    def row_slots(self, device: torch.device) -> Tensor:
        """Slot of each row, int64 `[rows]`."""

        def build() -> Tensor:
            lengths = torch.tensor(self.lengths)
            slots = torch.repeat_interleave(torch.arange(len(self.ends)), lengths)
            return to_device(slots, device)

        return self.cached(("row_slots", device), build)

    def row_keys(self, device: torch.device) -> Tensor:
        """Dropout key of each row before the layer is mixed in, int32 `[rows]`."""

        def build() -> Tensor:
            keys = torch.tensor((*self.dropout_keys, 0))[self.row_slots(torch.device("cpu"))]
            mixed = mix32(keys.to(torch.int32) ^ mix32(self.token_index.to(torch.int32)))
            return to_device(mixed, device)

        return self.cached(("row_keys", device), build)
