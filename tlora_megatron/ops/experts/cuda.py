"""Linears of routed experts on Hopper: one GEMM computes the base and its adapters' outputs.

A unit is 256 rows of one expert by a tile of columns, or, where at most 128 rows of the expert are
left, 128 rows by two tiles. It names the rank columns of the adapters that have rows in each half
of its rows.

Shapes: L experts, S slots and the null slot, P = L (S + 1) pairs, Q rows, K columns, W rank rows of
the widest slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertArenas, ExpertFactors, ExpertRuns, PlacedRows
from tlora_megatron.ops.experts.triton_products import down
from tlora_megatron.ops.experts.triton_sums import add_sums as triton_add_sums
from tlora_megatron.ops.experts.triton_tiles import (
    PairTiles,
    RankRows,
    RankTables,
    tables_of,
    tiles_of,
)
from tlora_megatron.ops.lora.cuda_arguments import ExpertGemmArguments, ExpertSumsArguments, packer
from tlora_megatron.ops.lora.cuda_calls import device_index, launch, multiprocessors
from tlora_megatron.ops.warm_kernel import WarmKernel

UNIT_FIELDS = 8
UNIT_ROWS = 256
TILE_COLUMNS = 256
_LANES = 128


class Units(NamedTuple):
    """The units of one product."""

    units: Tensor
    """int32 `[bound, UNIT_FIELDS]`: expert, first row, end, twice the column tile and 1 for the
    form of 128 rows; then first rank column and end of the first 128 rows, and of the others."""
    number: Tensor
    """int32 `[1]`: how many there are."""


@triton.jit(do_not_specialize=["experts", "columns", "tiles"])
def _scan_kernel(
    begins: tl.tensor,  # int32 [P + 1]
    unit_begins: tl.tensor,  # int32 [L]
    count: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    total = tl.full([], 0, tl.int32)
    for first in range(0, experts, BLOCK):
        expert = first + tl.arange(0, BLOCK)
        held = expert < experts
        begin = tl.load(begins + expert * columns, mask=held, other=0)
        rows = tl.load(begins + (expert + 1) * columns, mask=held, other=0) - begin
        pairs = (rows + 127) // 256
        single = (rows + 127) // 128 - 2 * pairs
        units = pairs * tiles + tl.maximum(single, 0) * ((tiles + 1) // 2)
        tl.store(unit_begins + expert, total + tl.cumsum(units, 0) - units, mask=held)
        total += tl.sum(units, 0)
    tl.store(count, total)


@triton.jit
def _count_up_to(
    sorted: tl.tensor, size: tl.tensor, value: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """How many of `sorted[:size]` are at most `value`, lane by lane; the first always is."""
    low, high = value * 0, value * 0 + size
    left = size
    while left > 0:
        middle = (low + high) // 2
        goes_on = low + 1 < high
        at = tl.load(sorted + middle, mask=inside & goes_on, other=0)
        low = tl.where(goes_on & (at <= value), middle, low)
        high = tl.where(goes_on & (at > value), middle, high)
        left = left // 2
    return low + 1


@triton.jit
def _ranks(
    begins: tl.tensor,
    positions: tl.tensor,
    expert: tl.tensor,
    columns: tl.tensor,
    row: tl.tensor,
    end: tl.tensor,
    inside: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Rank columns of the adapters with rows in `[row, end)`; none where that is empty."""
    of_expert = begins + expert * columns
    first = _count_up_to(of_expert, columns, row, inside) - 1
    last = _count_up_to(of_expert, columns, end - 1, inside) - 1
    some = inside & (row < end)
    low = tl.load(positions + first, mask=some, other=0)
    return low, tl.load(positions + last + 1, mask=some, other=0)


@triton.jit(do_not_specialize=["experts", "columns", "tiles", "bound"])
def _units_kernel(
    begins: tl.tensor,
    unit_begins: tl.tensor,
    count: tl.tensor,
    positions: tl.tensor,  # int32 [S + 2]: first rank column of each slot, and their end twice
    units: tl.tensor,  # int32 [bound, FIELDS]
    experts: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    bound: tl.tensor,
    LANES: tl.constexpr,
    FIELDS: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    unit = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = (unit < bound) & (unit < tl.load(count))
    expert = _count_up_to(unit_begins, experts, unit, inside) - 1
    local = unit - tl.load(unit_begins + expert, mask=inside, other=0)
    begin = tl.load(begins + expert * columns, mask=inside, other=0)
    end = tl.load(begins + (expert + 1) * columns, mask=inside, other=0)
    pairs = (end - begin + 127) // 256
    is_pair = local < pairs * tiles
    row = begin + tl.where(is_pair, local // tiles, pairs) * 256
    column = tl.where(is_pair, local % tiles, 2 * (local - pairs * tiles))
    end = tl.minimum(row + tl.where(is_pair, 256, 128), end)
    at = units + unit * FIELDS
    tl.store(at, expert, mask=inside)
    tl.store(at + 1, row, mask=inside)
    tl.store(at + 2, end, mask=inside)
    tl.store(at + 3, 2 * column + tl.where(is_pair, 0, 1), mask=inside)
    if RANKS:
        middle = tl.minimum(row + 128, end)
        low, high = _ranks(begins, positions, expert, columns, row, middle, inside)
        tl.store(at + 4, low, mask=inside)
        tl.store(at + 5, high, mask=inside)
        low, high = _ranks(begins, positions, expert, columns, row + 128, end, inside)
        tl.store(at + 6, low, mask=inside)
        tl.store(at + 7, high, mask=inside)


_scan = WarmKernel(_scan_kernel)
_units = WarmKernel(_units_kernel)


def make_units(
    begins: Tensor, num_experts: int, num_rows: int, columns_out: int, positions: Tensor | None
) -> Units:
    """Lists the units of a product; nothing waits for the device.

    Args:
        begins: int32 `[P + 1]`: the first row of each pair, and the end of the last.
        positions: int32 `[S + 2]`: the first rank column of each slot, then their end twice; None:
            the product has no rank part.
    """
    columns = (len(begins) - 1) // num_experts
    tiles = triton.cdiv(columns_out, TILE_COLUMNS)
    bound = (num_rows // UNIT_ROWS + min(num_experts, num_rows)) * tiles
    unit_begins = begins.new_empty(num_experts)
    count = begins.new_empty(1)
    units = begins.new_empty(bound, UNIT_FIELDS)
    sizes = (num_experts, columns, tiles)
    block = min(1024, triton.next_power_of_2(num_experts))
    _scan.launch(1, (begins, unit_begins, count), sizes, (block,), num_warps=4)
    if bound:
        _units.launch(
            triton.cdiv(bound, _LANES),
            (begins, unit_begins, count, begins if positions is None else positions, units),
            (*sizes, bound),
            (_LANES, UNIT_FIELDS, int(positions is not None)),
            num_warps=4,
        )
    return Units(units, count)


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


_GEMM = packer(ExpertGemmArguments)


class CudaExpertOps:
    """Computes experts' linears whole; never waits for the device."""

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[RankTables, dict[int, Tensor]] = WeakKeyDictionary()
        """The blocks of a linear's sums, for each table of its gradients."""
        self._units: WeakKeyDictionary[ExpertRuns, dict[tuple[int, int], Units]] = (
            WeakKeyDictionary()
        )

    @staticmethod
    def takes(x_QK: Tensor, weight_LNK: Tensor) -> bool:
        """Returns True if the GEMM can compute a linear: rows of 16 bytes."""
        sizes = weight_LNK.shape[1] | weight_LNK.shape[2]
        return x_QK.dtype == torch.bfloat16 and not sizes % 8 and len(x_QK) > 0

    def product(
        self,
        x_QK: Tensor,
        x: PlacedRows,
        weight_LNK: Tensor,
        runs: ExpertRuns,
        factors: ExpertFactors | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns `x W_e^T` with the adapters' outputs `[Q, N]`, and what backward needs.

        Args:
            x: the same rows, as adapters read them.
        """
        y_QN = x_QK.new_empty(len(x_QK), weight_LNK.shape[1])
        if factors is None:
            self._gemm(x_QK, weight_LNK, y_QN, runs, None, None, None, transposed=True)
            return y_QN, ()
        tables, arenas = tables_of(factors), factors.arenas
        wide_QR = x_QK.new_zeros(len(x_QK), arenas.lora_a.shape[1])
        tiles = tiles_of(runs, len(x_QK), x_QK.device)
        s_QW = down(x, tables.lora_a, tables, tiles, wide_QR)
        self._gemm(x_QK, weight_LNK, y_QN, runs, wide_QR, arenas.lora_b, arenas, transposed=True)
        return y_QN, (s_QW,)

    def dgrad(
        self,
        dy_QN: Tensor,
        dy: PlacedRows,
        weight_LNK: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        factors: ExpertFactors | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns dx `[Q, K]` and dS, and adds to the gradients of B.

        Args:
            dy: the same rows, as adapters read them.
        """
        dx_QK = dy_QN.new_empty(len(dy_QN), weight_LNK.shape[2])
        if factors is None:
            self._gemm(dy_QN, weight_LNK, dx_QK, runs, None, None, None, transposed=False)
            return dx_QK, ()
        tables, arenas = tables_of(factors), factors.arenas
        tiles, (s_QW,) = tiles_of(runs, len(dy_QN), dy_QN.device), saved
        wide_QR = dy_QN.new_zeros(len(dy_QN), arenas.lora_a.shape[1])
        ds_QW = down(dy, tables.lora_b, tables, tiles, wide_QR)
        self._add_sums(tables.grad_b, s_QW, dy, tables, tiles)
        self._gemm(dy_QN, weight_LNK, dx_QK, runs, wide_QR, arenas.lora_a, arenas, transposed=False)
        return dx_QK, (ds_QW,)

    def input_sums(
        self, ds: Sequence[Tensor], x: PlacedRows, runs: ExpertRuns, factors: ExpertFactors
    ) -> None:
        """Adds to the gradients of A."""
        (ds_QW,), tables = ds, tables_of(factors)
        tiles = tiles_of(runs, len(ds_QW), ds_QW.device)
        self._add_sums(tables.grad_a, ds_QW, x, tables, tiles)

    def _add_sums(
        self, rows: RankRows, s_QW: Tensor, values: PlacedRows, tables: RankTables, tiles: PairTiles
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
        known = self._entries.setdefault(tables, {})
        if id(rows) not in known:
            found = [(*entry[:-1], *entry.unused) for entry in sum_entries(rows, depth)]
            entries = torch.tensor(found, dtype=torch.int32).view(-1, 8)
            known[id(rows)] = entries.to(rows.places_4SW.device)
        entries = known[id(rows)]
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

    def _gemm(
        self,
        x_QK: Tensor,
        weight: Tensor,
        out_QN: Tensor,
        runs: ExpertRuns,
        wide_QR: Tensor | None,
        factors: Tensor | None,
        arenas: ExpertArenas | None,
        *,
        transposed: bool,
    ) -> None:
        units = self._units_of(runs, len(x_QK), out_QN.shape[1], arenas)
        arguments = _GEMM.pack(  # in the order of `ExpertGemmArguments`
            x_QK.data_ptr(),
            weight.data_ptr(),
            0 if wide_QR is None else wide_QR.data_ptr(),
            0 if factors is None else factors.data_ptr(),
            out_QN.data_ptr(),
            units.units.data_ptr(),
            units.number.data_ptr(),
            len(x_QK),
            out_QN.shape[1],
            x_QK.shape[1],
            len(weight),
            0 if factors is None else factors.shape[1],
            int(transposed),
            multiprocessors(x_QK.device) // 2 * 2,
            device_index(x_QK),
        )
        launch("expert_gemm", arguments, x_QK)

    def _units_of(
        self, runs: ExpertRuns, num_rows: int, columns_out: int, arenas: ExpertArenas | None
    ) -> Units:
        known = self._units.setdefault(runs, {})
        key = columns_out, id(arenas)
        if key not in known:
            begins = tiles_of(runs, num_rows, runs.counts_LS.device).begins
            positions = None if arenas is None else arenas.positions
            experts = len(runs.counts_LS)
            known[key] = make_units(begins, experts, num_rows, columns_out, positions)
        return known[key]


OPS = CudaExpertOps()
"""One for all linears: it keeps what it has listed for them."""
