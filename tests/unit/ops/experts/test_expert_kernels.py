"""Kernels of adapters on routed experts against their definition, in Triton's interpreter.

They run where `tests/unit/ops/test_interpreted_kernels.py` sets TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools

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
from tests.helpers.interpreter import interpreted
from tests.helpers.outer_case import outer_case
from tlora_megatron.ops.experts import choice
from tlora_megatron.ops.experts.branch import PlacedRows, TorchExpertOps


@interpreted
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_kernels_are_the_definition(name: str, dtype: torch.dtype) -> None:
    from tlora_megatron.ops.experts.triton_products import TritonExpertOps

    case = branch_case(CASES[name], dtype)
    expected = results(TorchExpertOps(), branch_case(CASES[name], torch.float64))
    found = results(TritonExpertOps(), case)
    check_close(found, expected, 1e-5 if dtype == torch.float32 else 3e-3)


@interpreted
def test_kernels_give_a_job_the_same_bits_beside_others() -> None:
    from tlora_megatron.ops.experts.triton_products import TritonExpertOps

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
    from tlora_megatron.ops.experts.triton_products import down
    from tlora_megatron.ops.experts.triton_tiles import tables_of, tiles_of

    case = branch_case(CASES[name], torch.float32)
    tables = tables_of(case.factors)
    tiles = tiles_of(case.runs, len(case.x), case.x.device)
    arenas = case.factors.arenas
    wide = torch.zeros(len(case.x), arenas.lora_a.shape[1])
    s = down(PlacedRows(case.x), tables.lora_a, tables, tiles, wide)
    slots = slots_of_rows(case)
    expected = torch.zeros_like(wide)
    for slot, targets in enumerate(case.factors.targets):
        rows, width = slots == slot, sum(target.lora_a.shape[1] for target in targets)
        begin = int(arenas.positions[slot])
        expected[rows, begin : begin + width] = s[rows, :width]
    assert torch.equal(wide, expected)
    assert expected.any()


@interpreted
@pytest.mark.parametrize("num_rows", [1, 130])
def test_kernels_compute_factors_that_experts_share(num_rows: int) -> None:
    from tlora_megatron.ops.experts import triton_rows as kernels

    case, twin = (outer_case(num_rows, torch.float32) for _ in range(2))
    first, other = case.call.first, twin.call.first
    assert first is not None
    assert other is not None
    for runs, side, twin_side, x, y in (
        (case.call.tokens, first.shared, other.shared, case.x_TH, torch.ones_like(case.x_TH)),
        (case.call.journey.runs, first.own, other.own, case.d_first, torch.ones_like(case.d_first)),
    ):
        s = kernels.shrink(x, runs, side, first.width)
        expected = choice.shrink(x, runs, side, first.width)
        torch.testing.assert_close(s, expected, rtol=1e-5, atol=1e-5)
        if runs is case.call.tokens:
            choice.scale(expected, runs, first)
            torch.testing.assert_close(kernels.scale(s, runs, first.scaling), expected)
        s, also = s.clone(), y.clone()
        kernels.expand(s, y, runs, side)
        choice.expand(s, also, runs, side)
        torch.testing.assert_close(y, also, rtol=1e-5, atol=1e-5)
        kernels.add_gradients(s, x, runs, side)
        assert any(target.grad.any() for target in itertools.chain(*side.targets))
        choice.add_gradients(s, x, runs, twin_side)
        for target, same in zip(
            itertools.chain(*side.targets), itertools.chain(*twin_side.targets), strict=True
        ):
            torch.testing.assert_close(target.grad, same.grad, rtol=1e-5, atol=1e-5)


@interpreted
def test_master_weights_are_cast_into_the_arenas() -> None:
    from tlora_megatron.ops.experts.triton_sums import CastFactor, FactorCaster

    arena = torch.zeros(3, 24, 1100, dtype=torch.float16)
    views = [arena[:, :5], arena[:, 8:10, 40:1100], arena[:, 16:17, :7]]
    begins = list(itertools.accumulate((view.numel() for view in views), initial=11))
    master = torch.randn(begins[-1])
    caster = FactorCaster([CastFactor(*pair) for pair in zip(begins, views, strict=False)])
    assert caster.write(master) == 0
    expected = torch.zeros_like(arena)
    places = [expected[:, :5], expected[:, 8:10, 40:1100], expected[:, 16:17, :7]]
    for begin, place in zip(begins, places, strict=False):
        place.copy_(master[begin : begin + place.numel()].view(place.shape))
    assert torch.equal(arena, expected)
    # Beyond the dtype, and no number: neither reaches an arena.
    master[begins[1] + 3], master[begins[2]] = -1e6, torch.nan
    assert caster.write(master).isnan()
    assert arena[0, 8, 43] == torch.finfo(torch.float16).min
    assert arena[0, 16, 0] == 0
    assert arena.isfinite().all()


@interpreted
@pytest.mark.parametrize("columns_out", [40, 256, 700])
def test_units_of_the_gemm_cover_every_row_once(columns_out: int) -> None:
    from tlora_megatron.ops.experts.cuda import make_units
    from tlora_megatron.ops.experts.triton_tiles import pair_tiles

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


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_blocks_of_sums_cover_every_gradient_once(name: str) -> None:
    from tlora_megatron.ops.experts.cuda import sum_entries
    from tlora_megatron.ops.experts.triton_tiles import tables_of

    case = branch_case(CASES[name], torch.float32)
    tables = tables_of(case.factors)
    for rows, depth in ((tables.grad_a, case.x.shape[1]), (tables.grad_b, case.y.shape[1])):
        covered = torch.zeros(tables.slots, tables.width + 64, depth)
        for entry in sum_entries(rows, depth):
            ranks = slice(entry.first, entry.first + entry.ranks)
            covered[entry.slot, ranks, entry.column : entry.column + entry.columns] += 1
            assert entry.filled == -(-int(tables.widths_S[entry.slot]) // 16) * 16
            assert entry.columns in {16: (256, 512), 32: (256,), 64: (128,)}[entry.ranks]
        assert covered.max() <= 1
        for slot, runs in enumerate(rows.runs_S):
            for run in runs:
                held = covered[slot, run.begin : run.end, run.columns.start : run.columns.stop]
                assert (held == 1).all()


def _rows_of(case: BranchCase, slot: int) -> Tensor:
    return slots_of_rows(case) == slot
