"""Linears as the CUDA kernels take them, fused outputs laid out in 64s, and micro-batches."""

from __future__ import annotations

import ctypes

from tests.helpers.kernel_case import columns_of
from tlora_megatron.ops.lora.cuda_arguments import (
    DgradArguments,
    ExchangeArguments,
    ExchangeStep,
    ExpertGemmArguments,
    ExpertSumsArguments,
    Fp8GemmArguments,
    GemmArguments,
    RowsArguments,
    SumsArguments,
)

WHOLE, QKV, GATE_UP = columns_of(1, 200), columns_of(2, 128, 64, 64), columns_of(1, 192, 192)
FUSED_AND_Q = (*columns_of(2, 256), QKV[0])
CASES = {
    "ragged segments": (QKV, [(4, 16, 8), (24, 1, 40), (16, 16, 16)], (3, 300, 129), 20),
    "a slot without rows": (GATE_UP, [(4, 8), (16, 2), (64, 64)], (100, 0, 57), 0),
    "missing targets": (QKV, [(4, 0, 8), (0, 33, 0), (0, 0, 16), (8, 8, 8)], (70, 60, 80, 90), 5),
    "missing all targets": (QKV, [(4, 8, 1), (0, 0, 0), (7, 0, 3)], (128, 100, 200), 0),
    "targets that nobody has": (QKV, [(0, 8, 0), (0, 0, 0), (0, 33, 0)], (70, 60, 300), 5),
    "ranks 1 to 256": (QKV, [(1, 256, 130), (256, 256, 256), (72, 5, 200)], (90, 210, 140), 7),
    "gate and up": (GATE_UP, [(128, 129), (0, 17)], (256, 256), 0),
    "whole fused beside q": (FUSED_AND_Q, [(16, 8), (0, 24), (40, 0)], (33, 280, 77), 60),
    "one adapter": (WHOLE, [(16,)], (700,), 0),
    "one adapter among rows without": (WHOLE, [(0,), (24,), (0,)], (130, 150, 200), 33),
    "64 adapters": (WHOLE, [(1 + 7 * i % 64,) for i in range(64)], [11] * 60 + [300, 0, 1, 2], 9),
}
"""Columns, ranks `[slot][target]`, rows of each slot, rows without an adapter."""

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
