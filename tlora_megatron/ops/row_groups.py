"""Which rows of a tensor belong to which adapter: what grouped GEMMs and dropout read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tlora_megatron.ops.dropout import mix32

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Runs of rows of one adapter each, covering every row of a tensor.

    `slots[i]` owns rows `ends[i-1]:ends[i]`. When `in_slot_order`, there is exactly one group a
    slot, 0 to the null slot, some of them empty, so that stacked weights serve a grouped GEMM as
    they are.
    """

    slots: tuple[int, ...]
    ends: tuple[int, ...]
    token_index: torch.Tensor
    """Index of each row among its job's tokens, int64 `[rows]` on the CPU."""
    num_slots: int
    dropout_keys: tuple[int, ...]
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def in_slot_order(self) -> bool:
        """Whether group i is slot i for all slots."""
        return self.cached("in_order", lambda: self.slots == tuple(range(self.num_slots + 1)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each group."""

        def build() -> tuple[int, ...]:
            return tuple(e - b for b, e in zip((0, *self.ends[:-1]), self.ends, strict=True))

        return self.cached("lengths", build)

    @property
    def present_slots(self) -> tuple[int, ...]:
        """Slots with at least one row, null slot left out, ascending."""

        def build() -> tuple[int, ...]:
            rows = zip(self.slots, self.lengths, strict=True)
            return tuple(sorted({s for s, n in rows if n and s < self.num_slots}))

        return self.cached("present", build)

    def cached(self, key: str, build: Callable[[], T]) -> T:
        """Returns the value stored under `key`, building it on first use."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    def offsets(self, device: torch.device) -> torch.Tensor:
        """`ends` as int32 `[groups]`: the `offs` of a grouped GEMM."""
        return self.cached(
            f"offsets@{device}", lambda: torch.tensor(self.ends, dtype=torch.int32, device=device)
        )

    def slot_index(self, device: torch.device) -> torch.Tensor:
        """`slots` as int64 `[groups]`."""
        return self.cached(f"slots@{device}", lambda: torch.tensor(self.slots, device=device))

    def additions(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Slots and groups, int64 `[n]` each, by which results a group are added to their slots.

        Every group of an adapter with rows is in one of the pairs, and no slot twice in one pair,
        so the order of a pair's additions does not matter. Slots lie in runs where context
        parallelism deals out chunks: two pairs at most, whatever the number of adapters.
        """
        return self.cached(f"additions@{device}", lambda: self._additions(device))

    def _additions(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        passes: list[tuple[list[int], list[int]]] = []
        times: dict[int, int] = {}
        for group, (slot, length) in enumerate(zip(self.slots, self.lengths, strict=True)):
            if length and slot < self.num_slots:
                turn = times[slot] = times.get(slot, -1) + 1
                if turn == len(passes):
                    passes.append(([], []))
                passes[turn][0].append(slot)
                passes[turn][1].append(group)
        return tuple(
            (torch.tensor(slots, device=device), torch.tensor(groups, device=device))
            for slots, groups in passes
        )

    def row_slots(self, device: torch.device) -> torch.Tensor:
        """Slot of each row, int64 `[rows]`."""

        def build() -> torch.Tensor:
            lengths = torch.tensor(self.lengths)
            return torch.repeat_interleave(torch.tensor(self.slots), lengths).to(device)

        return self.cached(f"row_slots@{device}", build)

    def row_keys(self, device: torch.device) -> torch.Tensor:
        """Dropout key of each row before the layer is mixed in, int32 `[rows]`."""

        def build() -> torch.Tensor:
            keys = torch.tensor((*self.dropout_keys, 0))[self.row_slots(torch.device("cpu"))]
            return mix32(keys.to(torch.int32) ^ mix32(self.token_index.to(torch.int32))).to(device)

        return self.cached(f"row_keys@{device}", build)


def merge_runs(
    runs: Sequence[tuple[int, int]], num_slots: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Joins neighbouring runs of a slot; one group for every slot when runs are in slot order."""
    slots = [slot for slot, _ in runs]
    if slots == sorted(slots):
        lengths = [0] * (num_slots + 1)
        for slot, length in runs:
            lengths[slot] += length
        return tuple(range(num_slots + 1)), tuple(lengths)
    merged: list[list[int]] = []
    for slot, length in runs:
        if merged and merged[-1][0] == slot:
            merged[-1][1] += length
        else:
            merged.append([slot, length])
    return tuple(s for s, _ in merged), tuple(n for _, n in merged)
