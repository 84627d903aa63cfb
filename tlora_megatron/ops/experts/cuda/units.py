"""Units of work of csrc/expert_gemm.cuh, made on the device from the numbers of rows.

A unit is 256 rows of one expert by a tile of columns, or, where at most 128 rows of the expert are
left, 128 rows by two tiles. It names the rank columns of the adapters that have rows in each half
of its rows.

Shapes: L experts, S slots and the null slot, P = L (S + 1) pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

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
        num_rows: of all experts.
        columns_out: columns of the product.
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
