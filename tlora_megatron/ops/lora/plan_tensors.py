"""Device copies of a micro-batch's work lists, at addresses that survive a change of segments.

A kernel under CUDA-graph capture keeps the addresses and grid it was captured with. So tables have
a capacity, which depends on the number of rows and the ranks alone, and `PlanTensors.update` writes
another micro-batch's lists in place; entries beyond the last are -1, and programs that find one
leave. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.ops.host_copy import Array, FixedTables
from tlora_megatron.ops.lora.tiling import (
    RANK_CHUNK,
    ROW_TILE,
    RankLayout,
    TilePlan,
    max_chunks,
    rank_chunks,
    tile_plan,
)
from tlora_megatron.ops.row_groups import RowGroups

T = TypeVar("T")
ITEM_FIELDS = 20
"""int32 of a work item: one program reads all it needs to know in one access."""
WORKSPACE_UNIT = 256
"""fp32 elements in which items count their place in the workspace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemList:
    """Work items of one kernel: one row tells one program what to do."""

    items: Array
    """`[items, ITEM_FIELDS]`."""
    workspace: int
    """Units of fp32 that partial sums take."""
    borders: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Where portions end among the parts of sums; empty where no slot has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemBounds:
    """The most that any micro-batch of these rows needs."""

    items: int
    workspace: int


class WorkItems:
    """An item list on the device, with the counters of partial sums that have arrived.

    It does not hold its plan, which holds it: a cycle would keep both, and their device memory,
    until Python looks for cycles.
    """

    def __init__(
        self, build: Callable[[PlanTensors], ItemList], bounds: ItemBounds | None, plan: PlanTensors
    ) -> None:
        self._build = build
        first = build(plan)
        self.count = len(first.items) if bounds is None else bounds.items
        """Programs to launch; those beyond the last item leave at once."""
        self.workspace = first.workspace if bounds is None else bounds.workspace
        device = plan.device
        sizes = {"items": max(self.count, 1) * ITEM_FIELDS, "borders": len(first.borders)}
        self._tables = FixedTables(sizes, device)
        self.counters = torch.zeros(max(self.count, 1), dtype=torch.int32, device=device)
        """Zero between launches: the last program to arrive resets its own."""
        self._tables.write({"items": first.items, "borders": first.borders})

    @functools.cached_property
    def partial_sums(self) -> Tensor:
        """fp32 `[workspace * WORKSPACE_UNIT]`, kept: the next kernel may start before the one that
        uses it has ended, so memory given back between the two could be written by both."""
        size = max(self.workspace, 1) * WORKSPACE_UNIT
        return self.counters.new_empty(size, dtype=torch.float32)

    @property
    def items(self) -> Tensor:
        """int32 `[count * ITEM_FIELDS]`."""
        return self._tables["items"]

    @property
    def borders(self) -> Tensor:
        """int32 `[borders]`: `ItemList.borders`."""
        return self._tables["borders"]

    def update(self, plan: PlanTensors) -> None:
        """Writes the items of the plan's present micro-batch in place."""
        fresh = self._build(plan)
        if fresh.workspace > self.workspace:
            raise ValueError(
                f"workspace must be at most {self.workspace} units, got {fresh.workspace}"
            )
        self._tables.write({"items": fresh.items})


class PlanTensors:
    """The work lists of one micro-batch at the sites of one layout, on the device.

    Args:
        graph_safe: tables and grids by capacity, so that `update` can follow a capture; else exact.
        cuts: as `RowGroups.cuts`.

    Raises:
        NotImplementedError: for cuts with graph_safe.
    """

    def __init__(
        self,
        ends: Sequence[int],
        layout: RankLayout,
        device: torch.device,
        *,
        graph_safe: bool,
        cuts: Sequence[int] = (),
    ) -> None:
        if graph_safe and cuts:
            raise NotImplementedError(
                f"cuts must be empty with graph_safe, got {len(cuts)}: run portions one by one"
            )
        self.cuts = tuple(cuts)
        self.layout = layout
        self.device = device
        self.graph_safe = graph_safe
        self.num_rows = ends[-1]
        chunks = [[rank_chunks(r) for r in slot] for slot in layout.ranks]
        shape = (len(chunks), layout.num_targets)
        self.slot_chunks: Array = np.array(chunks, dtype=np.int64).reshape(shape)
        """`[slots, targets]`: chunks of each adapter."""
        self.most_chunks = int(self.slot_chunks.sum(axis=1).max(initial=0))
        """The most chunks of any slot, over all its targets."""
        self.most_target_chunks = int(self.slot_chunks.max(initial=0))
        """The most chunks of any one target of a slot."""
        self._items: dict[Hashable, WorkItems] = {}
        self._cache: dict[Hashable, Any] = {}
        self._take(ends)
        self._tables = FixedTables(self._capacities(), device)
        self._tables.write(self._values())

    def _take(self, ends: Sequence[int]) -> None:
        self.ends = tuple(ends)
        self.plan: TilePlan = tile_plan(ends, self.layout)
        pairs = self.plan.pairs
        head = np.array([p[:4] for p in pairs], dtype=np.int64).reshape(len(pairs), 4)
        self.pair_slot, self.pair_tile, self.pair_begin, self.pair_end = head.T
        shape = (len(pairs), self.layout.num_targets)
        self.pair_chunks: Array = np.array([p.chunks for p in pairs], dtype=np.int64).reshape(shape)
        """`[pairs, targets]`: first chunk of each."""
        totals = self.slot_chunks[self.pair_slot].sum(axis=1)
        self.pair_first: Array = np.cumsum(totals) - totals
        """A pair: where its chunks begin in the table `chunks`."""
        bounds = np.array((0, *ends[:-1]), dtype=np.int64)
        self.slot_begin: Array = bounds[:-1]
        """A slot: its first row."""
        sizes = np.diff(bounds) * self.slot_chunks.sum(axis=1)
        self.row_form: Array = np.cumsum(sizes) - sizes
        """A slot: where its rows begin in the row form of s and dS, in chunks."""

    @property
    def num_chunks(self) -> int:
        """Chunks that s and dS must have room for."""
        if self.graph_safe:
            return max_chunks(self.num_rows, self.layout)
        return self.plan.num_chunks

    @property
    def ranked_rows(self) -> int:
        """Rows of s and dS, which are `[ranked_rows, ROW_TILE]`.

        First `num_chunks * RANK_CHUNK` rows of chunks as in `ops.lora.tiling`, for GEMMs. Then the
        same values in *row form*, for sums over rows: slot by slot and row by row, all its rank
        values side by side, so that they are aligned wherever the slot's rows begin.
        """
        if self.graph_safe:
            row_form = self.num_rows * self.most_chunks
        else:
            lengths = np.diff((0, *self.ends[:-1]))
            row_form = int((lengths * self.slot_chunks.sum(axis=1)).sum())
        return self.num_chunks * RANK_CHUNK + -(-row_form * RANK_CHUNK // ROW_TILE)

    @property
    def max_pairs(self) -> int:
        """Pairs at most: a boundary between segments adds one to the tiles."""
        if not self.graph_safe:
            return len(self.plan.pairs)
        return -(-self.num_rows // ROW_TILE) + min(len(self.layout.ranks), self.num_rows)

    def _capacities(self) -> dict[str, int]:
        targets = self.layout.num_targets
        return {
            "chunks": self.num_chunks,
            "tile_chunks": len(self.plan.tile_chunks) * (targets + 1),
            "chunk_a": self.num_chunks,
            "chunk_b": self.num_chunks,
            "row_slots": self.num_rows,
        }

    def _values(self) -> dict[str, Array]:
        counts = self.slot_chunks[self.pair_slot].ravel()
        owner, position = spread(counts)
        slots = np.append(np.arange(len(self.ends) - 1), -1)
        return {
            "chunks": self.pair_chunks.ravel()[owner] + position,
            "tile_chunks": np.array(self.plan.tile_chunks),
            "chunk_a": np.array(self.plan.chunk_a),
            "chunk_b": np.array(self.plan.chunk_b),
            "row_slots": np.repeat(slots, np.diff(self.ends, prepend=0)),
        }

    def __getitem__(self, name: str) -> Tensor:
        """A table, int32, flat.

        `chunks`: pair by pair, target by target, its chunks of s and dS (a pair's begin at
        `pair_first`); `tile_chunks` `[tiles, targets + 1]`, `chunk_a` and `chunk_b` as in
        `TilePlan`; `row_slots`: the slot of each row, -1 where it has no adapter.
        """
        return self._tables[name]

    def work_items(
        self,
        key: Hashable,
        build: Callable[[PlanTensors], ItemList],
        bounds: Callable[[PlanTensors], ItemBounds],
    ) -> WorkItems:
        """The items that `build` lists for this plan, made once a key.

        Args:
            build: kept as long as the plan, so it must not hold activations, or the plan itself.
        """
        found = self._items.get(key)
        if found is None:
            limit = bounds(self) if self.graph_safe else None
            found = self._items[key] = WorkItems(build, limit, self)
        return found

    def cached(self, key: Hashable, build: Callable[[PlanTensors], T]) -> T:
        """Returns what `build` makes of layout and number of rows, made once for any segments."""
        if key not in self._cache:
            self._cache[key] = build(self)
        return self._cache[key]

    def update(self, ends: Sequence[int]) -> None:
        """Takes another micro-batch of as many rows, in place.

        Raises:
            ValueError: if its slots or rows are not as many, or the tables were made exact.
        """
        if not self.graph_safe or len(ends) != len(self.ends) or ends[-1] != self.num_rows:
            raise ValueError(
                f"ends must be {len(self.ends)} up to {self.num_rows} and the tables made with "
                f"graph_safe, got {len(ends)} up to {ends[-1]}, graph_safe={self.graph_safe}"
            )
        self._take(ends)
        self._tables.write(self._values())
        for items in self._items.values():
            items.update(self)


def plan_tensors(
    rows: RowGroups, layout: RankLayout, device: torch.device, *, graph_safe: bool = False
) -> PlanTensors:
    """Returns the work lists of a micro-batch on a device, made once for all sites of a layout."""
    plans = rows.cached(("plan tensors", device), _Plans)
    known = plans.of_object.get(id(layout))
    if known is not None:
        return known[1]
    plan = plans.of_value.get(layout)
    if plan is None:
        plan = PlanTensors(rows.ends, layout, device, graph_safe=graph_safe, cuts=rows.cuts)
        plans.of_value[layout] = plan
    # The layout is kept beside the plan, so its id is not given to another one.
    plans.of_object[id(layout)] = (layout, plan)
    return plan


class _Plans:
    """The plans of one micro-batch on one device: sites with equal layouts share theirs."""

    def __init__(self) -> None:
        self.of_value: dict[RankLayout, PlanTensors] = {}
        self.of_object: dict[int, tuple[RankLayout, PlanTensors]] = {}
        """By id: a layout's hash walks through all ranks, and every launch asks."""


def update_plans(rows: RowGroups, other: RowGroups, device: torch.device) -> None:
    """Writes the tables of `other` over those of `rows`, in place: before a graph's replay."""
    assert not other.cuts, "plans of several portions are not replayed"
    for plan in rows.cached(("plan tensors", device), _Plans).of_value.values():
        plan.update(other.ends)
    if rows.dropout_keys:
        rows.row_keys(device).copy_(other.row_keys(device))


def spread(counts: Array) -> tuple[Array, Array]:
    """For `counts[i]` entries of each i, in order: i, and the entry's number among those of i."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def item_array(columns: Sequence[Array | int], count: int) -> Array:
    """Items from their fields, `[count, ITEM_FIELDS]`; missing fields are 0."""
    items = np.zeros((count, ITEM_FIELDS), dtype=np.int64)
    for index, values in enumerate(columns):
        items[:, index] = values
    return items
