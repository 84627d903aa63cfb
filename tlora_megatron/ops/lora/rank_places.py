"""Places of the values in s and dS that ranks exchange: one value a token and rank row.

Layouts of s and dS are each implementation's own (`ops.lora.linear_ops`), with chunks filled up
and, for kernels that read them two ways, every value twice. Between ranks travels one value a token
and rank row, in an order that all ranks share: part by part, slot by slot, row by row, target by
target, rank row by rank row. A *part* is what one rank of several holds of an adapter's rank rows,
`ceil(rank / parts)` each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlora_megatron.ops.host_copy import Array, to_device
from tlora_megatron.ops.lora.tiling import (
    RANK_CHUNK,
    ROW_TILE,
    PlanTensors,
    RankLayout,
    rank_chunks,
    spread,
)
from tlora_megatron.ops.routing import RowGroups

Gather = Callable[[Tensor, Tensor], Tensor]
"""`gather_or_zero`, or a kernel of the same."""


def gather_or_zero(values: Tensor, places: Tensor) -> Tensor:
    """`values[places - 1]` of contiguous values, flat; 0 where a place is 0.

    Args:
        places: int32 `[n]`.
    """
    return torch.cat([values.new_zeros(1), values.flatten()]).index_select(0, places)


class RankPlaces:
    """Reads and writes all values of s or dS, each with one gather by a table of places.

    Args:
        shape: of s.
        copies: int64 `[n]` each: the values' places, once for each copy that s holds of them.
        missing: int64 on the CPU: values that are only there to fill a part up; None = none.
        gather: reads tables.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        copies: tuple[Tensor, ...],
        missing: Tensor | None = None,
        gather: Gather = gather_or_zero,
    ) -> None:
        self.shape = shape
        self._gather = gather
        read = copies[0] + 1
        self.num_values = count = read.numel()
        """Values of all parts."""
        order = torch.arange(1, count + 1, device=read.device)
        if missing is not None:
            held = torch.ones(count, dtype=torch.bool).index_fill_(0, missing, False)
            kept = to_device(held.nonzero().flatten(), read.device)
            read.index_fill_(0, to_device(missing, read.device), 0)
            order, copies = order[kept], tuple(copy[kept] for copy in copies)
        self._read = read.int()
        written = torch.zeros(math.prod(shape), dtype=torch.int64, device=read.device)
        for places in copies:
            written.index_copy_(0, places, order)
        self._written = written.int()

    def take(self, s: Tensor) -> Tensor:
        """The values `[n]`, 0 where a part is only filled up."""
        return self._gather(s, self._read)

    def put(self, values: Tensor) -> Tensor:
        """s with these values `[n]`, 0 elsewhere."""
        return self._gather(values, self._written).view(self.shape)


class _Columns(NamedTuple):
    """One slot's rank rows of one part, all targets, side by side."""

    target: Array
    row: Array
    """Rank row of the target's factor."""
    place: Array
    """Column in the slot's row form: targets' chunks side by side."""
    missing: NDArray[np.bool_]


@functools.lru_cache(maxsize=4096)
def _slot_columns(ranks: tuple[int, ...], part: int, parts: int) -> _Columns:
    sizes = -(-_array(ranks) // parts)
    target, row = spread(sizes)
    row += part * sizes[target]
    widths = _array([RANK_CHUNK * rank_chunks(rank) for rank in ranks])
    place = (widths.cumsum() - widths)[target] + row
    return _Columns(target, row, place, row >= _array(ranks)[target])


class Elements(NamedTuple):
    """One value each, in the order that ranks share; int64 `[n]` on the device."""

    slot: Tensor
    """Among the slots that have rows and ranks."""
    row: Tensor
    """Number among the slot's own rows."""
    target: Tensor
    rank_row: Tensor
    place: Tensor
    """Column in the slot's row form."""


Places = tuple[tuple[int, ...], tuple[Tensor, ...]]
"""The shape of s, and the values' places in it for every copy that it holds of them."""


def elements(
    rows: RowGroups, layout: RankLayout, parts: int, device: torch.device
) -> tuple[Elements, Tensor | None]:
    """Returns all values of a micro-batch, and those that only fill a part up (`RankPlaces`)."""
    slots = held_slots(rows, layout)
    columns = [_slot_columns(layout.ranks[s], k, parts) for k in range(parts) for s in slots]
    widths = _array([len(c.row) for c in columns])
    heights = _array([rows.lengths[s] for s in slots] * parts)
    counts = widths * heights
    blocks = np.stack([counts.cumsum() - counts, widths, widths.cumsum() - widths])
    none = [_array([])]
    table = np.stack([np.concatenate(none + [c[field] for c in columns]) for field in range(3)])
    total = int(counts.sum())
    owner = torch.repeat_interleave(_on(counts, device), output_size=total)
    begin, width, first = _on(blocks, device)[:, owner]
    local = torch.arange(total, device=device) - begin
    row = local // width
    target, rank_row, place = _on(table, device)[:, first + local - row * width]
    found = Elements(owner % max(len(slots), 1), row, target, rank_row, place)
    if not any(c.missing.any() for c in columns):
        return found, None
    missing = [np.tile(c.missing, h) for c, h in zip(columns, heights, strict=True)]
    return found, torch.from_numpy(np.concatenate(missing).nonzero()[0])


def _array(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int64)


def _on(array: Array, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)


def held_slots(rows: RowGroups, layout: RankLayout) -> list[int]:
    """Slots that have rows and ranks here, ascending."""
    return [slot for slot in rows.present_slots if any(layout.ranks[slot])]


def first_rows(rows: RowGroups, layout: RankLayout, device: torch.device) -> Tensor:
    """The first row of each of `held_slots`, int64."""
    begins = [rows.ends[s] - rows.lengths[s] for s in held_slots(rows, layout)]
    return _on(_array(begins), device)


def row_form(rows: RowGroups, layout: RankLayout, found: Elements) -> Tensor:
    """Returns places in row form: slot by slot `[rows, chunks * 16]`, one below the other."""
    slots = held_slots(rows, layout)
    widths = _array([RANK_CHUNK * sum(map(rank_chunks, layout.ranks[s])) for s in slots])
    sizes = widths * _array([rows.lengths[s] for s in slots])
    table = np.stack([sizes.cumsum() - sizes, widths])
    begin, width = _on(table, found.slot.device)[:, found.slot]
    return begin + found.row * width + found.place


def cached_places(
    rows: RowGroups,
    layout: RankLayout,
    parts: int,
    device: torch.device,
    form: str,
    build: Callable[[Elements], Places],
    gather: Gather = gather_or_zero,
) -> RankPlaces:
    """Returns the places of a micro-batch, made once for all sites that share the layout.

    Args:
        form: names how `build` lays s out.
    """

    def make() -> tuple[RankLayout, RankPlaces]:
        found, missing = elements(rows, layout, parts, device)
        shape, copies = build(found)
        return layout, RankPlaces(shape, copies, missing, gather)

    # The layout is kept beside the places, so its id is not given to another one.
    return rows.cached(("places", form, parts, id(layout), device), make)[1]


def plan_places(rows: RowGroups, plan: PlanTensors, found: Elements) -> Places:
    """Returns the places in the s and dS of `PlanTensors`: in row form and in chunks."""
    behind = plan.num_chunks * RANK_CHUNK * ROW_TILE
    copies = behind + row_form(rows, plan.layout, found), chunk_form(rows, plan, found)
    return (plan.ranked_rows, ROW_TILE), copies


def chunk_form(rows: RowGroups, plan: PlanTensors, found: Elements) -> Tensor:
    """Returns places in the transposed chunks of each pair, `[chunks * 16, 256]`."""
    slots = held_slots(rows, plan.layout)
    begins = _array([rows.ends[s] - rows.lengths[s] for s in slots])
    first_pair = np.searchsorted(plan.pair_slot, _array(slots))
    table = _on(np.stack([begins, first_pair - begins // ROW_TILE]), plan.device)
    begin, pair = table[:, found.slot]
    row = begin + found.row
    chunk = _on(plan.pair_chunks, plan.device)[pair + row // ROW_TILE, found.target]
    return (chunk * RANK_CHUNK + found.rank_row) * ROW_TILE + row % ROW_TILE
