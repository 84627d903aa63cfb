"""Work lists of the fused kernels: a pure function of a micro-batch's segments and their ranks.

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
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tlora_megatron.ops.host_copy import Array

ROW_TILE = 256
"""Rows of a tile: two thread blocks of 128, a cluster of the Hopper GEMM."""
RANK_CHUNK = 16
"""Depth of one bf16 or fp16 tensor-core step."""


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


def run_table(runs: Sequence[Run]) -> Array:
    """The fields of runs, int64 `[runs, 6]`."""
    return np.array(runs, dtype=np.int64).reshape(len(runs), len(Run._fields))


def portion_borders(table: Array) -> Borders:
    """Finds where portions end among the runs of a `run_table`."""
    part, parts, portion = table[:, 3], table[:, 4], table[:, 5]
    is_border = (part > 0) & (portion != np.roll(portion, 1))
    passed = np.cumsum(is_border)
    first = np.arange(len(table)) - part
    place = (passed - is_border)[first]
    count = passed[first + parts - 1] - place
    return Borders(part[is_border], count, np.where(count > 0, place, 0))


def max_chunks(num_rows: int, layout: RankLayout) -> int:
    """The most chunks any micro-batch of `num_rows` rows can have: the size of graph-safe buffers.

    A segment of n rows touches at most `(n - 2) // ROW_TILE + 2` tiles.
    """
    per_slot = [sum(rank_chunks(r) for r in slot) for slot in layout.ranks]
    return max(per_slot, default=0) * (num_rows // ROW_TILE) + 2 * sum(per_slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class DownConfig:
    """Blocks of `s = scaling * drop(x) A^T`."""

    block_rows: int = 64
    """Rows of a program; a divisor of the row tile."""
    block_depth: int = 64
    """Features that one step of its loop reads."""
    rank_tile: int = 128
    """Rank rows of a program at most; a slot with more takes several."""
    splits: int = 2
    """Programs that share the features of one block; their fp32 parts are summed in order."""
    num_warps: int = 4
    num_stages: int = 4
    """For up to 64 rank rows; programs with more have one stage less, to stand beside others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpConfig:
    """Blocks of `s B^T` and `drop(dS A)`, which the base GEMM then adds to."""

    block_rows: int = 128
    """A divisor of the row tile."""
    block_columns: int = 64
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardUpConfig:
    """Blocks of the launch that computes dS and dB."""

    block_rows: int = 64
    """Rows of a dS program; a divisor of the row tile."""
    block_depth: int = 128
    """Columns of dy that one step of a dS program reads."""
    split_columns: int = 4096
    """Columns of dy that a dS program sums at most: more are split and summed in order."""
    block_columns: int = 128
    """Columns of a dB block."""
    step_rows: int = 64
    """Rows that one step of a dB program reads."""
    rows_per_run: int = 1024
    """Rows that a dB program sums at most."""
    item_size: int = 131072
    """Elements of dy that a dB program reads at most, where it could take more columns."""
    region_rows: int = 1024
    """dS and dB programs of as many rows stand together, so that L2 serves the second read."""
    rank_tile: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardDownConfig:
    """Blocks of `dA += dS^T drop(x)`; fields as in `BackwardUpConfig`."""

    block_columns: int = 128
    step_rows: int = 64
    rows_per_run: int = 1024
    item_size: int = 131072
    rank_tile: int = 128
    num_warps: int = 4
    """For up to 64 rank rows; programs with more have as many times the warps."""
    num_stages: int = 3
    """A fourth gains 3 % on an H200, but may not fit where blocks have 100 KiB of shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Blocks of all kernels of one linear at one budget of rows."""

    down: DownConfig = DownConfig()
    up: UpConfig = UpConfig()
    backward_up: BackwardUpConfig = BackwardUpConfig()
    backward_down: BackwardDownConfig = BackwardDownConfig()

    def __post_init__(self) -> None:
        for part in dataclasses.fields(self):
            _check(part.name, getattr(self, part.name))


def _check(part: str, config: Any) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        power = value > 0 and value & (value - 1) == 0
        if field.name.startswith("block_") or field.name in ("num_warps", "rank_tile", "step_rows"):
            if not power:
                raise ValueError(f"{part}.{field.name} must be a power of two, got {value}")
        elif value < 1:
            raise ValueError(f"{part}.{field.name} must be at least 1, got {value}")
    rows = getattr(config, "block_rows", 1)
    if ROW_TILE % rows:
        raise ValueError(f"{part}.block_rows must divide {ROW_TILE}, got {rows}")
    split = getattr(config, "split_columns", 0)
    block = max(getattr(config, name, 1) for name in ("block_columns", "block_depth"))
    if split % block:
        raise ValueError(f"{part}.split_columns must be a multiple of {block}, got {split}")


_FEW_ROWS = KernelConfig(
    backward_up=BackwardUpConfig(block_depth=64, split_columns=2048, num_warps=8),
    backward_down=BackwardDownConfig(rank_tile=64, num_warps=8),
)
_MANY_ROWS = KernelConfig()


def kernel_config(row_budget: int) -> KernelConfig:
    """Returns the blocks for all micro-batches of a run: they decide orders of sums.

    Searched offline on an H200 (bf16, torch 2.11, Triton 3.6) for up to and for more than 2048
    rows: `backward_up` takes 74 us where one set of blocks for all budgets took 83.

    Args:
        row_budget: `RowGroups.row_budget`.
    """
    return _FEW_ROWS if row_budget <= 2048 else _MANY_ROWS
