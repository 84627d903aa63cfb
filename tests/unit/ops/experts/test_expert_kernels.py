"""Kernels of adapters on routed experts against their definition, in Triton's interpreter.

They run where `tests/unit/ops/test_interpreted_kernels.py` sets TRITON_INTERPRET.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from tests.helpers.expert_branch import (
    CASES,
    BranchCase,
    branch_case,
    check_close,
    results,
    slots_of_rows,
    units_reference,
)
from tlora_megatron.ops.experts.branch import TorchExpertOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.helpers.interpreter import ready_interpreter

    ready_interpreter()
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")


@interpreted
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_kernels_are_the_definition(name: str, dtype: torch.dtype) -> None:
    from tlora_megatron.ops.experts.triton.ops import TritonExpertOps

    case = branch_case(CASES[name], dtype)
    expected = results(TorchExpertOps(), branch_case(CASES[name], torch.float64))
    found = results(TritonExpertOps(), case)
    check_close(found, expected, 1e-5 if dtype == torch.float32 else 3e-3)


@interpreted
def test_kernels_give_a_job_the_same_bits_beside_others() -> None:
    from tlora_megatron.ops.experts.triton.ops import TritonExpertOps

    alone = branch_case(CASES["uneven"], torch.float16, only=1)
    beside = branch_case(CASES["uneven"], torch.float16)
    found, expected = (results(TritonExpertOps(), case) for case in (beside, alone))
    for name in expected:
        if name.startswith("slot 1"):
            assert torch.equal(found[name], expected[name]), name
    for name, rows in (("y", "y"), ("dx", "dx")):
        assert torch.equal(found[name][_rows_of(beside, 1)], expected[rows][_rows_of(alone, 1)])


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_kernels_fill_the_rank_columns_of_the_arenas(name: str) -> None:
    from tlora_megatron.ops.experts.triton.ops import TritonExpertOps
    from tlora_megatron.ops.experts.triton.products import down

    case, ops = branch_case(CASES[name], torch.float32), TritonExpertOps()
    tables, tiles = ops.tables_of(case.factors), ops.tiles_of(case.runs, len(case.x))
    arenas = case.factors.arenas
    assert arenas is not None
    wide = torch.zeros(len(case.x), arenas.lora_a.shape[1])
    s = down(case.x, tables.lora_a, tables, tiles, wide)
    slots = slots_of_rows(case)
    expected = torch.zeros_like(wide)
    for slot, targets in enumerate(case.factors.targets):
        rows, width = slots == slot, sum(target.lora_a.shape[1] for target in targets)
        begin = int(arenas.positions[slot])
        expected[rows, begin : begin + width] = s[rows, :width]
    assert torch.equal(wide, expected)
    assert expected.any()


@interpreted
@pytest.mark.parametrize("columns_out", [40, 256, 700])
def test_units_of_the_gemm_cover_every_row_once(columns_out: int) -> None:
    from tlora_megatron.ops.experts.cuda.units import make_units
    from tlora_megatron.ops.experts.triton.tiles import pair_tiles

    counts = torch.randint(0, 90, (7, 6))
    counts[2] = 0
    counts[3, 1:4] = torch.tensor([0, 600, 0])
    positions = torch.tensor([0, 8, 8, 40, 48, 112, 112], dtype=torch.int32)
    rows = int(counts.sum())
    begins = pair_tiles(counts, rows).begins
    units, count = make_units(begins, len(counts), rows, columns_out, positions)
    found = [tuple(unit) for unit in units[: int(count)].tolist()]
    assert found == units_reference(begins, len(counts), columns_out, positions)
    tiles = -(-columns_out // 256)
    covered = torch.zeros(rows, tiles + 1, dtype=torch.int64)
    for _, row, end, column, *_ in found:
        tile, single = divmod(column, 2)
        covered[row:end, tile : tile + 1 + single] += 1
    assert (covered[:, :tiles] == 1).all()


def _rows_of(case: BranchCase, slot: int) -> Tensor:
    return slots_of_rows(case) == slot
