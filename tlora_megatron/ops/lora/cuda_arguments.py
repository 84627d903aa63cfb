"""The structs that the functions of `csrc/` take, field by field, and the linears that fit them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tlora_megatron.ops.dropout import SEED_COLUMNS
from tlora_megatron.ops.lora.linear_ops import OutputColumns, SiteFactors
from tlora_megatron.ops.lora.tiling import ROW_TILE

MAX_TARGETS = 4
"""Targets of one linear: `kMaxTargets` of lora.cuh."""
MAX_RANKS = 8
"""Ranks of a group that copies through peer memory: `kMaxRanks` of exchange.cu."""
_Pointer = ctypes.c_void_p
_Int = ctypes.c_int
_Long = ctypes.c_int64


class Columns(ctypes.Structure):
    """`Columns` of lora.cuh."""

    _fields_ = [(name, _Int) for name in ("groups", "stride", "begin", "width")]


class Factors(ctypes.Structure):
    """`Factors` of lora.cuh."""

    _fields_ = [
        ("at", _Pointer * MAX_TARGETS),
        *((name, _Long * MAX_TARGETS) for name in ("rows", "width")),
        ("columns", Columns * MAX_TARGETS),
    ]


class GemmArguments(ctypes.Structure):
    """`TloraGemm` of lora_gemm.cu."""

    _fields_ = [
        *((name, _Pointer) for name in ("x", "weight", "bias", "ext")),
        *((name, _Pointer) for name in ("out", "tile_chunks", "chunk_rows")),
        *((name, _Pointer) for name in ("row_keys", "row_slots", "dropout")),
        *((name, _Long) for name in ("rows", "columns_out", "depth", "ext_rows")),
        ("factors", Factors),
        *((name, _Int) for name in ("num_targets", "dropout_key", "first_column")),
        *((name, _Int) for name in ("transposed", "tile_columns", "group")),
        *((name, _Int) for name in ("blocks", "overlaps_previous_kernel", "device")),
    ]


class ExpertGemmArguments(ctypes.Structure):
    """`TloraExpertGemm` of expert_gemm.cu."""

    _fields_ = [
        *((name, _Pointer) for name in ("x", "weight", "s", "factors", "out")),
        *((name, _Pointer) for name in ("units", "num_units")),
        *((name, _Long) for name in ("rows", "columns_out", "depth", "experts", "rank_rows")),
        *((name, _Int) for name in ("transposed", "blocks", "device")),
    ]


class ExpertSumsArguments(ctypes.Structure):
    """`TloraExpertSums` of expert_sums.cu."""

    _fields_ = [
        *((name, _Pointer) for name in ("values", "s", "rows")),
        *((name, _Pointer) for name in ("begins", "entries", "places")),
        ("depth", _Long),
        *((name, _Int) for name in ("num_entries", "experts", "columns", "width", "device")),
    ]


class DgradArguments(ctypes.Structure):
    """`TloraFp8Dgrad` of fp8_dgrad.cu."""

    _fields_ = [
        ("gemm", GemmArguments),
        *((name, _Pointer) for name in ("row_scales", "block_scales")),
    ]


class Fp8GemmArguments(ctypes.Structure):
    """`TloraFp8Gemm` of fp8_gemm.cu."""

    _fields_ = [
        ("gemm", GemmArguments),
        *((name, _Pointer) for name in ("row_scales", "scales")),
        ("block", _Int),
    ]


class RowsArguments(ctypes.Structure):
    """`TloraRows` of rank_rows.cu."""

    _fields_ = [
        *((name, _Pointer) for name in ("input", "ext", "rows", "items", "chunks", "row_keys")),
        *((name, _Pointer) for name in ("scaling", "dropout")),
        *((name, _Long) for name in ("num_rows", "in_columns")),
        ("factors", Factors),
        *(
            (name, _Int)
            for name in ("num_targets", "num_items", "item_fields", "parts", "row_width")
        ),
        ("first_row", _Int),
        *((name, _Int) for name in ("dropout_key", "first_column", "device")),
    ]


class SumsArguments(ctypes.Structure):
    """`TloraSums` of rank_sums.cu."""

    _fields_ = [
        *((name, _Pointer) for name in ("x", "ds", "dy", "s", "items", "borders")),
        *((name, _Pointer) for name in ("grad_a", "grad_b")),
        *((name, _Pointer) for name in ("workspace", "counters", "row_keys", "dropout")),
        *((name, _Long) for name in ("num_rows", "x_rows", "x_columns", "dy_columns")),
        *(
            (name, _Int)
            for name in ("num_items", "item_fields", "blocks", "row_width", "first_row")
        ),
        *((name, _Int) for name in ("dropout_key", "first_column", "overlaps_previous_kernel")),
        ("device", _Int),
    ]


class ExchangeStep(ctypes.Structure):
    """`TloraStep` of exchange.cu."""

    _fields_ = [
        *((name, _Int) for name in ("kind", "phase", "sources")),
        *((name, _Int) for name in ("from_base", "to_base", "also_base")),
        *((name, _Long) for name in ("from_offset", "to_offset", "also_offset", "num_bytes")),
    ]


class ExchangeArguments(ctypes.Structure):
    """`TloraExchange` of exchange.cu."""

    _fields_ = [
        *((name, _Pointer) for name in ("x", "out")),
        ("areas", _Pointer * MAX_RANKS),
        ("flags", _Pointer * MAX_RANKS),
        ("steps", ctypes.POINTER(ExchangeStep)),
        ("slot_bytes", _Long),
        *((name, _Int) for name in ("num_steps", "rank", "size", "dtype", "blocks", "device")),
    ]


def packer(struct_type: type[ctypes.Structure]) -> struct.Struct:
    """Returns a packer of a struct's fields, in order, into its bytes.

    A struct object whose fields are set by name takes the host ten times as long. A nested struct
    or array is given as bytes.
    """
    codes = {_Pointer: "Q", _Int: "i", _Long: "q"}
    parts, end = [], 0
    for name, kind, *_ in struct_type._fields_:
        begin = getattr(struct_type, name).offset
        parts += [f"{begin - end}x", codes.get(kind, f"{ctypes.sizeof(kind)}s")]
        end = begin + ctypes.sizeof(kind)
    return struct.Struct("=" + "".join(parts) + f"{ctypes.sizeof(struct_type) - end}x")


class Arenas:
    """Factors of one linear, named once for all launches that read them.

    Args:
        arenas: `[rows, columns]`: one a target, or one that all targets share.
        columns: a target's: which columns of the wide tensor its arena holds; empty = the shared
            arena holds all.
    """

    def __init__(self, arenas: tuple[Tensor, ...], columns: tuple[OutputColumns, ...]) -> None:
        self.arenas, self.columns = arenas, columns
        argument = Factors()
        for i, arena in enumerate(arenas):
            argument.at[i] = arena.data_ptr()
            argument.rows[i], argument.width[i] = arena.shape
        for i, c in enumerate(columns):
            argument.columns[i] = Columns(c.groups, c.stride, c.begin, c.width)
        self.argument = bytes(argument)


_SPEEDS = ((256, 1.0), (192, 0.93), (128, 0.9))
"""Widths of tiles and the share of the widest's speed that each reaches (H200, gemm_times of
docs/measurements)."""
_MAX_COLUMNS = 256 * 256
"""`kMaxColumnTiles` of gemm_tiles.cuh, all of the widest."""


class GemmTile(NamedTuple):
    """How a GEMM is divided among thread blocks."""

    columns: int
    """Columns of a tile: 128, 192 or 256."""
    group: int = 8
    """Row tiles whose column tiles are computed one after another."""


def is_supported(factors: SiteFactors) -> bool:
    """Returns True if the kernels can compute a linear, whatever the micro-batch.

    Beside its sizes they need gradients at 16 bytes: bulk copies fault elsewhere, and an odd size
    of one linear shifts others' gradients in the slabs.
    """
    sizes = (factors.size_in, factors.size_out)
    return factors.is_aligned and not why_not_sizes(factors.columns, *sizes, factors.first_column)


def why_not_sizes(
    columns: Sequence[OutputColumns], size_in: int, size_out: int, first_column: int
) -> str | None:
    """Returns why the kernels cannot compute linears of such sizes; None if they can.

    They need rows of whole 16 bytes, fused columns in 64s, and shards of x that begin where a block
    of the dropout mask does.
    """
    if not fit_gemm(size_in, size_out):
        return f"sizes must be multiples of 8, up to {_MAX_COLUMNS}, got {size_in} and {size_out}"
    if first_column % SEED_COLUMNS:
        return f"shards of the input must have multiples of {SEED_COLUMNS} features"
    if any(not c.is_whole and (c.begin % 64 or c.width % 64 or c.stride % 64) for c in columns):
        return "fused outputs must come in multiples of 64 features"
    if len(columns) > MAX_TARGETS:
        return f"targets must be at most {MAX_TARGETS}, got {len(columns)}"
    return None


def fit_gemm(*sizes: int) -> bool:
    """True if the GEMM takes a weight of these sizes."""
    return not any(size % 8 or size > _MAX_COLUMNS for size in sizes)


@functools.cache
def gemm_tile(
    row_budget: int, columns: int, clusters: int, speeds: tuple[tuple[int, float], ...] = _SPEEDS
) -> GemmTile:
    """Returns how a GEMM is divided into tiles on a GPU of so many clusters.

    Narrow tiles pay where the widest leaves much of the last wave idle.

    Args:
        row_budget: `RowGroups.row_budget`.
        speeds: widths of tiles, and the share of the widest's speed that each reaches.
    """
    row_tiles = -(-row_budget // ROW_TILE)

    def efficiency(pair: tuple[int, float]) -> float:
        width, speed = pair
        tiles = row_tiles * -(-columns // width)
        used = row_budget * columns / (tiles * ROW_TILE * width)
        return speed * used * tiles / (-(-tiles // clusters) * clusters)

    allowed = [pair for pair in speeds if columns * 256 <= _MAX_COLUMNS * pair[0]]
    return GemmTile(max(allowed, key=efficiency)[0])
