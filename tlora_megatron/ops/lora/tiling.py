"""Work lists of the fused kernels: a function of a micro-batch's segments and their ranks alone.

The rank of an adapter counts in chunks of 16, the depth of one tensor-core step: a rank-4 adapter
costs one chunk, a rank-64 adapter four, whoever shares the micro-batch. Weights lie in *arenas*
without padding beyond that: `lora_a` of a site is `[a_rows, K]`, slot by slot and within a slot
target by target; `lora_b` of a target is `[b_rows, N]`, slot by slot. Rows that fill a chunk are
zero.

Rows of a micro-batch are divided into *row tiles* of 256. A *pair* is a row tile and a slot with
rows in it. Rank-sized activations (s, dS) are kept per row tile as `[chunks * 16, 256]`,
transposed: a tile's GEMM runs through its chunks after (or before) the K of the base, with zeros in
the rows of other adapters. So segments need no alignment, and a GEMM tile that four adapters
share costs the sum of their ranks.

Sums over a segment's rows (dA, dB) go over *runs*, counted from the segment's own beginning, so
that a job's gradient is bitwise the same wherever its rows lie. Where a segment holds several
portions of its job, runs are counted from each portion's beginning, and the gradient takes the sum
of one portion after the other: bitwise what micro-batches with a portion each would leave.

`PlanTensors` has the lists on the device; nothing here waits for it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.ops.host_copy import Array, device_tables
from tlora_megatron.ops.routing import RowGroups

ROW_TILE = 256
"""Rows of a tile: two thread blocks of 128, a cluster of the Hopper GEMM."""
RANK_CHUNK = 16
"""Depth of one bf16 or fp16 tensor-core step."""
ITEM_FIELDS = 20
"""int32 of a work item: one program reads all it needs to know in one access."""
WORKSPACE_UNIT = 256
"""fp32 elements in which items count their place in the workspace."""


def rank_chunks(rank: int) -> int:
    """Chunks of `RANK_CHUNK` that hold a rank; 0 for rank 0."""
    return -(-rank // RANK_CHUNK)


@dataclass(frozen=True)
class RankLayout:
    """Places of the adapters of one site in its arenas."""

    ranks: tuple[tuple[int, ...], ...]
    """`[slot][target]`: LoRA ranks, 0 where the slot's job does not adapt the target."""

    @property
    def num_targets(self) -> int:
        """Targets of the site that some slot adapts."""
        return len(self.ranks[0]) if self.ranks else 0

    @cached_property
    def a_begin(self) -> tuple[tuple[int, ...], ...]:
        """`[slot][target]`: first row in the arena of `lora_a`."""
        flat = [RANK_CHUNK * rank_chunks(rank) for slot in self.ranks for rank in slot]
        begins = [0, *itertools.accumulate(flat)]
        p = self.num_targets
        return tuple(tuple(begins[i * p : i * p + p]) for i in range(len(self.ranks)))

    @cached_property
    def b_begin(self) -> tuple[tuple[int, ...], ...]:
        """`[slot][target]`: first row in that target's arena of `lora_b`."""
        begins, row = [], [0] * self.num_targets
        for slot in self.ranks:
            begins.append(tuple(row))
            row = [r + RANK_CHUNK * rank_chunks(rank) for r, rank in zip(row, slot, strict=True)]
        return tuple(begins)

    @cached_property
    def a_rows(self) -> int:
        """Rows of the arena of `lora_a`."""
        return sum(self.b_rows)

    @cached_property
    def b_rows(self) -> tuple[int, ...]:
        """Rows of each target's arena of `lora_b`."""
        by_target = zip(*self.ranks, strict=True)
        return tuple(sum(RANK_CHUNK * rank_chunks(r) for r in ranks) for ranks in by_target)


class Pair(NamedTuple):
    """A row tile and a slot with rows in it."""

    slot: int
    tile: int
    begin: int
    """First row of the slot in the tile, counted from the micro-batch's begin."""
    end: int
    chunks: tuple[int, ...]
    """A target: its first chunk in s and dS; -1 where the slot does not adapt it."""


class Run(NamedTuple):
    """Rows of one slot that one thread block sums for dA or dB."""

    slot: int
    begin: int
    end: int
    part: int
    """Which of the slot's `parts` runs this is, in row order."""
    parts: int
    portion: int
    """Number of its portion among the slot's in the micro-batch, in row order."""


class Borders(NamedTuple):
    """Places where the runs of a segment pass from one portion to the next."""

    parts: Array
    """`[borders]`, segment by segment: the first part of every portion but a segment's first."""
    counts: Array
    """A run: how many of them its segment has."""
    places: Array
    """A run: where its segment's begin in `parts`; 0 if it has none."""


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Work lists of one micro-batch at the sites that share a `RankLayout`."""

    pairs: tuple[Pair, ...]
    """Slot by slot, a slot's tiles in order."""
    tile_chunks: tuple[tuple[int, ...], ...]
    """A tile: chunks of target p are `tile_chunks[t][p]:tile_chunks[t][p + 1]`."""
    chunk_a: tuple[int, ...]
    """A chunk: its first row in the arena of `lora_a`."""
    chunk_b: tuple[int, ...]
    """A chunk: its first row in its target's arena of `lora_b`."""

    @property
    def num_chunks(self) -> int:
        """Chunks of s and dS, which are `[num_chunks * RANK_CHUNK, ROW_TILE]`."""
        return len(self.chunk_a)


def tile_plan(ends: Sequence[int], layout: RankLayout) -> TilePlan:
    """Lists the work of a micro-batch.

    Args:
        ends: end row of every slot's segment, the null slot's (rows without an adapter) last.
        layout: of the site; `len(layout.ranks) == len(ends) - 1`.
    """
    begins = (0, *ends[:-1])
    tile_chunks: list[tuple[int, ...]] = []
    chunk_a: list[int] = []
    chunk_b: list[int] = []
    chunks: dict[tuple[int, int], list[int]] = {}
    for tile, slots in enumerate(_slots_of_tiles(ends, layout)):
        bounds = [len(chunk_a)]
        for p in range(layout.num_targets):
            for slot in slots:
                n = rank_chunks(layout.ranks[slot][p])
                chunks.setdefault((slot, tile), []).append(len(chunk_a) if n else -1)
                steps = [RANK_CHUNK * i for i in range(n)]
                chunk_a += [layout.a_begin[slot][p] + step for step in steps]
                chunk_b += [layout.b_begin[slot][p] + step for step in steps]
            bounds.append(len(chunk_a))
        tile_chunks.append(tuple(bounds))
    pairs = tuple(
        Pair(
            slot,
            tile,
            max(begins[slot], tile * ROW_TILE),
            min(ends[slot], (tile + 1) * ROW_TILE),
            tuple(first_chunks),
        )
        for (slot, tile), first_chunks in sorted(chunks.items())
    )
    return TilePlan(
        pairs=pairs,
        tile_chunks=tuple(tile_chunks),
        chunk_a=tuple(chunk_a),
        chunk_b=tuple(chunk_b),
    )


def _slots_of_tiles(ends: Sequence[int], layout: RankLayout) -> list[list[int]]:
    """Returns the slots with rows in each tile, without those that adapt nothing."""
    inside: list[list[int]] = [[] for _ in range(-(-ends[-1] // ROW_TILE))]
    for slot, (begin, end) in enumerate(itertools.pairwise((0, *ends[:-1]))):
        if end > begin and any(layout.ranks[slot]):
            for tile in range(begin // ROW_TILE, -(-end // ROW_TILE)):
                inside[tile].append(slot)
    return inside


def row_runs(
    ends: Sequence[int],
    layout: RankLayout,
    rows_per_run: int,
    window: tuple[int, int],
    cuts: Sequence[int] = (),
) -> tuple[Run, ...]:
    """Divides portions into runs of `rows_per_run`, counted from each portion's own first row.

    Args:
        window: only rows in `window[0]:window[1]` count; a sequence-parallel rank's share.
        cuts: as `RowGroups.cuts`.
    """
    runs = []
    begins = (0, *ends[:-1])
    for slot, (begin, end) in enumerate(zip(begins[:-1], ends[:-1], strict=True)):
        if not any(layout.ranks[slot]):
            continue
        bounds = (begin, *cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)], end)
        pieces = [
            (max(b, window[0]), min(b + rows_per_run, last, window[1]), portion)
            for portion, (first, last) in enumerate(itertools.pairwise(bounds))
            for b in range(first, last, rows_per_run)
        ]
        pieces = [piece for piece in pieces if piece[1] > piece[0]]
        runs += [Run(slot, b, e, i, len(pieces), n) for i, (b, e, n) in enumerate(pieces)]
    return tuple(runs)


def portion_borders(table: Array) -> Borders:
    """Finds where portions end among runs, int64 `[runs, fields of Run]`."""
    part, parts, portion = table[:, 3], table[:, 4], table[:, 5]
    is_border = (part > 0) & (portion != np.roll(portion, 1))
    passed = np.cumsum(is_border)
    first = np.arange(len(table)) - part
    place = (passed - is_border)[first]
    count = passed[first + parts - 1] - place
    return Borders(part[is_border], count, np.where(count > 0, place, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemList:
    """Work items of one kernel: one row tells one program what to do."""

    items: Array
    """`[items, ITEM_FIELDS]`."""
    workspace: int
    """Units of fp32 that partial sums take."""
    borders: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Where portions end among the parts of sums; empty where no slot has several."""


class WorkItems:
    """An item list on the device, with the counters of partial sums that have arrived."""

    def __init__(self, found: ItemList, device: torch.device) -> None:
        self.count = len(found.items)
        """Programs to launch."""
        self.workspace = found.workspace
        tables = device_tables({"items": found.items, "borders": found.borders}, device)
        self.items = tables["items"]
        """int32 `[count * ITEM_FIELDS]`."""
        self.borders = tables["borders"]
        """int32 `[borders]`: `ItemList.borders`."""
        self.counters = torch.zeros(self.count, dtype=torch.int32, device=device)
        """Zero between launches: the last program to arrive resets its own."""

    @cached_property
    def partial_sums(self) -> Tensor:
        """fp32 `[workspace * WORKSPACE_UNIT]`, kept: the next kernel may start before the one that
        uses it has ended, so memory given back between the two could be written by both."""
        size = max(self.workspace, 1) * WORKSPACE_UNIT
        return self.counters.new_empty(size, dtype=torch.float32)


class PlanTensors:
    """The work lists of one micro-batch at the sites of one layout, on the device.

    Args:
        cuts: as `RowGroups.cuts`.
    """

    def __init__(
        self,
        ends: Sequence[int],
        layout: RankLayout,
        device: torch.device,
        *,
        cuts: Sequence[int] = (),
    ) -> None:
        self.ends, self.cuts = tuple(ends), tuple(cuts)
        self.layout = layout
        self.device = device
        self.num_rows = ends[-1]
        chunks = [[rank_chunks(r) for r in slot] for slot in layout.ranks]
        shape = (len(chunks), layout.num_targets)
        self.slot_chunks: Array = np.array(chunks, dtype=np.int64).reshape(shape)
        """`[slots, targets]`: chunks of each adapter."""
        self.a_begin: Array = np.array(layout.a_begin, dtype=np.int64).reshape(shape)
        self.b_begin: Array = np.array(layout.b_begin, dtype=np.int64).reshape(shape)
        """`[slots, targets]`: as of the layout."""
        self.row_chunks: Array = self.slot_chunks.sum(axis=1)
        """A slot: its chunks over all targets."""
        self.most_chunks = int(self.row_chunks.max(initial=0))
        """The most chunks of any slot, over all its targets."""
        self.most_target_chunks = int(self.slot_chunks.max(initial=0))
        """The most chunks of any one target of a slot."""
        plan = tile_plan(ends, layout)
        self.num_chunks = plan.num_chunks
        """Chunks of s and dS."""
        head = np.array([p[:4] for p in plan.pairs], dtype=np.int64).reshape(len(plan.pairs), 4)
        self.pair_slot, self.pair_tile, self.pair_begin, self.pair_end = head.T
        shape = (len(plan.pairs), layout.num_targets)
        first_chunks = [p.chunks for p in plan.pairs]
        self.pair_chunks: Array = np.array(first_chunks, dtype=np.int64).reshape(shape)
        """`[pairs, targets]`: first chunk of each."""
        totals = self.row_chunks[self.pair_slot]
        self.pair_first: Array = np.cumsum(totals) - totals
        """A pair: where its chunks begin in the table `chunks`."""
        bounds = np.array((0, *ends[:-1]), dtype=np.int64)
        self.slot_begin: Array = bounds[:-1]
        """A slot: its first row."""
        sizes = np.diff(bounds) * self.row_chunks
        self.row_form: Array = np.cumsum(sizes) - sizes
        """A slot: where its rows begin in the row form of s and dS, in chunks."""
        tiles = -(-int(sizes.sum()) * RANK_CHUNK // ROW_TILE)
        self.ranked_rows = self.num_chunks * RANK_CHUNK + tiles
        """Rows of s and dS, which are `[ranked_rows, ROW_TILE]`.

        First `num_chunks * RANK_CHUNK` rows of chunks as in `ops.lora.tiling`, for GEMMs. Then the
        same values in *row form*, for sums over rows: slot by slot and row by row, all its rank
        values side by side, so that they are aligned wherever the slot's rows begin.
        """
        owner, position = spread(self.slot_chunks[self.pair_slot].ravel())
        slots = np.append(np.arange(len(ends) - 1), -1)
        values = {
            "chunks": self.pair_chunks.ravel()[owner] + position,
            "tile_chunks": np.array(plan.tile_chunks),
            "chunk_a": np.array(plan.chunk_a),
            "chunk_b": np.array(plan.chunk_b),
            "row_slots": np.repeat(slots, np.diff(self.ends, prepend=0)),
        }
        self._tables = device_tables(values, device)
        self._items: dict[Hashable, WorkItems] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A table, int32, flat.

        `chunks`: pair by pair, target by target, its chunks of s and dS (a pair's begin at
        `pair_first`); `tile_chunks` `[tiles, targets + 1]`, `chunk_a` and `chunk_b` as in
        `TilePlan`; `row_slots`: the slot of each row, -1 where it has no adapter.
        """
        return self._tables[name]

    def runs(self, rows_per_run: int, window: tuple[int, int]) -> tuple[Array, Borders]:
        """The runs of a window's rows, int64 `[runs, fields of Run]`, and their borders."""
        runs = row_runs(self.ends, self.layout, rows_per_run, window, self.cuts)
        table = np.array(runs, dtype=np.int64).reshape(len(runs), len(Run._fields))
        return table, portion_borders(table)

    def work_items(self, key: Hashable, build: Callable[[PlanTensors], ItemList]) -> WorkItems:
        """The items that `build` lists for this plan, made once a key."""
        found = self._items.get(key)
        if found is None:
            found = self._items[key] = WorkItems(build(self), self.device)
        return found


def plan_tensors(rows: RowGroups, layout: RankLayout, device: torch.device) -> PlanTensors:
    """Returns the work lists of a micro-batch on a device, one for all sites of equal layouts."""

    def of_value() -> PlanTensors:
        return PlanTensors(rows.ends, layout, device, cuts=rows.cuts)

    def of_object() -> tuple[RankLayout, PlanTensors]:
        # The layout is kept beside the plan, so its id is not given to another one.
        return layout, rows.cached(("plan", device, layout), of_value)

    # By id: a layout's hash walks through all ranks, and every launch asks.
    return rows.cached(("plan", device, id(layout)), of_object)[1]


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
