"""Linears as the CUDA kernels take them, fused outputs laid out in 64s, and micro-batches."""

from __future__ import annotations

import torch

from tests.helpers.kernel_case import KernelCase, columns_of
from tlora_megatron.ops.lora.cuda_work_items import rank_columns
from tlora_megatron.ops.lora.plan_tensors import PlanTensors
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, ROW_TILE, rank_chunks
from tlora_megatron.ops.row_groups import RowGroups

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


def rank_rows_by_definition(
    case: KernelCase, values: torch.Tensor, rows: RowGroups, *, per_target: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """s or dS as `[chunks * 16, 256]` and as rows, where NaN is what nobody writes."""
    plan = PlanTensors(rows.ends, case.layout, values.device, graph_safe=False)
    ext = torch.zeros(plan.num_chunks * RANK_CHUNK, ROW_TILE, dtype=values.dtype)
    row_form = torch.full((plan.num_rows, rank_columns(case.layout)), torch.nan, dtype=values.dtype)
    for pair in plan.plan.pairs:
        mine = slice(pair.begin, pair.end)
        in_tile = slice(pair.begin - pair.tile * ROW_TILE, pair.end - pair.tile * ROW_TILE)
        column = 0
        for p, (chunk, rank) in enumerate(
            zip(pair.chunks, case.layout.ranks[pair.slot], strict=True)
        ):
            size = RANK_CHUNK * rank_chunks(rank)
            begins = case.layout.b_begin if per_target else case.layout.a_begin
            arena = case.factors.lora_b[p] if per_target else case.factors.lora_a
            begin = begins[pair.slot][p]
            read = case.columns[p].read(values[mine]) if per_target else values[mine]
            found = read @ arena[begin : begin + size].t() * case.factors.scaling[pair.slot]
            row_form[mine, column : column + size] = found
            ext[chunk * RANK_CHUNK : chunk * RANK_CHUNK + size, in_tile] = found.t()
            column += size
    return ext, row_form
