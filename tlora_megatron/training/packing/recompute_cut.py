"""Cuts a round into micro-batches each of which needs as little recompute as its sequences do.

A sequence that fits without recompute runs beside others of which that is true, in micro-batches
that stay as short as that asks; long ones run apart from them, with recompute. Micro-batches of
much recompute come first: allocators divide large blocks, and cannot join small ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from tlora_megatron.model.dispatch import cut
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.training.packing.packing import (
    MicroBatch,
    MicroBatchItems,
    Placed,
    Round,
    in_packed_order,
)


def cut_round(content: Round, table: RecomputeTable, padding: int = 0) -> Round:
    """Cuts the part of every replica that has any items anew.

    Args:
        padding: rows that a micro-batch may get beside its items.
    """
    replicas = [_cut_replica(own, table, padding) if any(own) else own for own in content.replicas]
    return Round(replicas=tuple(replicas))


def _cut_replica(
    whole: Sequence[MicroBatchItems], table: RecomputeTable, padding: int
) -> tuple[MicroBatchItems, ...]:
    placed = list(itertools.chain(*whole))
    if any(p.portion is not None for p in placed):
        return _cut_portions(placed, table, padding)
    parts = cut_by_recompute([p.item.length for p in placed], table, padding)
    return tuple(in_packed_order([placed[i] for i in part]) for part in parts)


def cut_by_recompute(
    lengths: Sequence[int], table: RecomputeTable, padding: int = 0
) -> list[list[int]]:
    """Cuts one replica's sequences into micro-batches, those of one recompute as `dispatch.cut`.

    Returns:
        Places in `lengths`, by micro-batch.
    """
    alike: dict[int, list[int]] = {}
    for place, rows in enumerate(lengths):
        alike.setdefault(table.room_around(rows + padding) - padding, []).append(place)
    return [
        [alike[budget][i] for i in part]
        for budget in sorted(alike, reverse=True)
        for part in cut([lengths[place] for place in alike[budget]], budget)
    ]


def _cut_portions(
    placed: Sequence[Placed], table: RecomputeTable, padding: int
) -> tuple[MicroBatchItems, ...]:
    """Keeps portions whole and each job's in order: the next goes beside the last or behind it."""
    units: dict[tuple[int, int, int], list[Placed]] = {}
    for p in placed:
        own = p.item.index if p.portion is None else -1
        units.setdefault((p.portion or 0, p.slot, own), []).append(p)
    parts: list[list[Placed]] = []
    room, budget = 0, 0
    for _, unit in sorted(units.items(), key=lambda entry: entry[0]):
        rows = sum(p.item.length for p in unit)
        around = table.room_around(rows + padding) - padding
        if not parts or around != budget or rows > room:
            parts.append([])
            room = budget = around
        parts[-1] += unit
        room -= rows
    return tuple(map(in_packed_order, parts))


def with_recompute(
    micro_batch: MicroBatch, table: RecomputeTable, cp_size: int | None = None
) -> MicroBatch:
    """Names a packed micro-batch's recompute, for the batch that an engine runs.

    Args:
        cp_size: context-parallel ranks of a replica, each with as many rows as this one's; None =
            the micro-batch's.
    """
    batch = micro_batch.executed
    recompute = table.of(batch.view.num_tokens * (cp_size or batch.view.cp_size))
    batch = replace(batch, view=batch.view.under(recompute))
    if micro_batch.split is None:
        return MicroBatch(batch)
    return micro_batch._replace(split=micro_batch.split._replace(batch=batch))
