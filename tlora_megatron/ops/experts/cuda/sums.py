"""Gradients of adapters on routed experts on Hopper: `grad += s^T values` by csrc/expert_sums.cu.

Shapes: L experts, S slots and the null slot, P = L (S + 1) pairs, Q rows, K columns, W rank rows of
the widest slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import PlacedRows
from tlora_megatron.ops.experts.rank_tables import RankRows, RankTables
from tlora_megatron.ops.experts.triton.sums import add_sums as triton_add_sums
from tlora_megatron.ops.experts.triton.tiles import PairTiles
from tlora_megatron.ops.lora.cuda.arguments import ExpertSumsArguments, packer
from tlora_megatron.ops.lora.cuda.calls import device_index, launch

_SUMS = packer(ExpertSumsArguments)
_MOST_RANKS = 64
"""Rank rows of a block."""
_ELEMENTS = 1 << 13
"""Gradient elements of a block: the fewer rank rows, the more columns."""


class SumEntry(NamedTuple):
    """A block's part of an expert's gradients: `Entry` of expert_sums.cu."""

    slot: int
    first: int
    """Its first rank row."""
    column: int
    filled: int
    """Rank rows of the slot, up to a multiple of 16: where s has values or zeros."""
    ranks: int
    """16, 32 or 64."""
    columns: int
    unused: tuple[int, int] = (0, 0)


class ExpertSums:
    """Adds to gradients; keeps what a linear's tables say of its blocks."""

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[RankTables, dict[int, Tensor]] = WeakKeyDictionary()

    def add(
        self,
        rows: RankRows,
        s_QW: Tensor,
        values: PlacedRows,
        tables: RankTables,
        tiles: PairTiles,
    ) -> None:
        """Adds `s^T values` of every pair to its gradients.

        Args:
            rows: of the gradients: one of those in `tables`.
            values: bf16, K a multiple of 8.
        """
        values_TK, rows_Q = values
        depth = values_TK.shape[1]
        if not rows.aligned or rows.span % 2:
            triton_add_sums(rows, s_QW, values, tables, tiles)
            return
        entries = self._entries_of(rows, tables, depth)
        arguments = _SUMS.pack(  # in the order of `ExpertSumsArguments`
            values_TK.data_ptr(),
            s_QW.data_ptr(),
            0 if rows_Q is None else rows_Q.data_ptr(),
            tiles.begins.data_ptr(),
            entries.data_ptr(),
            rows.places_4SW.data_ptr(),
            depth,
            len(entries),
            (len(tiles.begins) - 1) // (tables.slots + 1),
            tables.slots + 1,
            tables.width,
            device_index(s_QW),
        )
        launch("expert_sums", arguments, s_QW)

    def _entries_of(self, rows: RankRows, tables: RankTables, depth: int) -> Tensor:
        known = self._entries.setdefault(tables, {})
        key = id(rows)
        if key not in known:
            device = rows.places_4SW.device
            found = [(*entry[:-1], *entry.unused) for entry in sum_entries(rows, depth)]
            known[key] = torch.tensor(found, dtype=torch.int32).view(-1, 8).to(device)
        return known[key]


def sum_entries(rows: RankRows, depth: int) -> Iterator[SumEntry]:
    """Lists the blocks of an expert; those in which a slot has no gradient are left out."""
    for slot, runs in enumerate(rows.runs_S):
        width, first = max((run.end for run in runs), default=0), 0
        filled = -(-width // 16) * 16
        while first < width:
            ranks = next((r for r in (16, 32) if r >= width - first), _MOST_RANKS)
            columns = _ELEMENTS // ranks
            if ranks == 16 and rows.span % columns:
                columns //= 2  # so that more of them lie in a target's columns as a whole
            end = first + ranks
            held = [run.columns for run in runs if run.begin < end and run.end > first]
            for column in range(0, depth, columns):
                if any(r.start < column + columns and r.stop > column for r in held):
                    yield SumEntry(slot, first, column, filled, ranks, columns)
            first = end
