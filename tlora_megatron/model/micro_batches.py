"""Says how many micro-batches a round has, and cuts sequences into them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def choose_num_micro_batches(tokens: float, capacity: float, dp_size: int, pp_size: int) -> int:
    """Micro-batches a round: 1 without a pipeline; with one, enough to fill it, at most 4 a stage.

    Short rounds let every job step as soon as its batch is done; 4 a stage keeps the 1F1B bubble
    under `(pp - 1) / (5 pp - 1)`, a fifth.
    """
    if pp_size == 1:
        return 1
    return min(max(math.ceil(tokens / (capacity * dp_size)), pp_size), 4 * pp_size)


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Returns the places of sizes, the largest first; equal ones stay in their order."""
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


def cut(lengths: Sequence[int], budget: int, fewest: int = 0) -> list[list[int]]:
    """Cuts one replica's sequences into as few micro-batches as first fit finds, evenly filled.

    Depends on the lengths alone. The fullest micro-batch comes first.

    Args:
        lengths: rows of each sequence, at most `budget`.
        fewest: micro-batches that there must be, for which some may stay empty.

    Returns:
        Places in `lengths`, by micro-batch.
    """
    order = largest_first(lengths)
    packed = _first_fit(lengths, order, budget)
    packed += [[] for _ in range(fewest - len(packed))]
    even = cut_evenly(lengths, len(packed), budget) if len(packed) > 1 else None
    parts = packed if even is None else even
    rows = [sum(lengths[i] for i in part) for part in parts]
    return [parts[i] for i in largest_first(rows)]


def cut_evenly(lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Cuts sequences into so many micro-batches of about equally many rows.

    Returns:
        Places in `lengths`, by micro-batch; None if one would hold more than `budget` rows.
    """
    loads = [(0, part) for part in range(count)]
    parts: list[list[int]] = [[] for _ in loads]
    for i in largest_first(lengths):
        load, part = loads[0]
        if load + lengths[i] > budget:
            return None
        parts[part].append(i)
        heapq.heapreplace(loads, (load + lengths[i], part))
    return parts


def _first_fit(lengths: Sequence[int], order: Sequence[int], budget: int) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[int] = []
    for i in order:
        part = next((p for p, free in enumerate(room) if free >= lengths[i]), len(parts))
        if part == len(parts):
            parts.append([])
            room.append(budget)
        parts[part].append(i)
        room[part] -= lengths[i]
    return parts
