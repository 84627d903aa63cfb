"""The structs that the functions of `csrc/` take, field by field."""

from __future__ import annotations

import ctypes
import struct

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


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "gemm": GemmArguments,
    "expert_gemm": ExpertGemmArguments,
    "expert_sums": ExpertSumsArguments,
    "fp8_dgrad": DgradArguments,
    "fp8_gemm": Fp8GemmArguments,
    "rows": RowsArguments,
    "sums": SumsArguments,
    "step": ExchangeStep,
    "exchange": ExchangeArguments,
}
"""The struct that each function of the library takes."""
