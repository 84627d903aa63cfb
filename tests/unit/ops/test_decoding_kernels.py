"""The kernels of decoding steps compute their definitions; by themselves where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.helpers.interpreter import DEVICE, INTERPRETED, RUNS
from tests.helpers.kernel_case import CASES, ODD, make_case, poisoned_memory
from tlora_megatron.ops.decoding import (
    KeySpans,
    SlotRuns,
    add_up_reference,
    attend_cached_reference,
    down_reference,
    most_runs,
    slot_runs,
)
from tlora_megatron.ops.decoding_triton import launch_attention, launch_down, launch_up

pytestmark = RUNS
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # which the interpreter multiplies wrongly
TOLERANCES = {torch.float32: 2e-5, HALF: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("name", "depth"), [("q k v", 2100), ("gate up", 80), ("odd", 96)])
def test_kernels_of_linears(name: str, depth: int, dtype: torch.dtype) -> None:
    columns, ranks = (ODD, [[4, 5], [0, 0], [33, 8], [9, 40]]) if name == "odd" else CASES[name]
    case = make_case(ranks, columns, depth, dtype=dtype, device=DEVICE)
    slots = [0] * 3 + [1] * 2 + [2] + [3] * 18 + [4] * 2  # the last ones have no adapter
    table = slot_runs(slots, 4, most_runs(len(slots), 4))
    runs = SlotRuns(torch.from_numpy(table).int().to(DEVICE))
    x_TK = torch.randn(len(slots), depth, device=DEVICE).to(dtype)
    y_TN = torch.randn(len(slots), case.out_size, device=DEVICE).to(dtype)
    expected = y_TN.clone()
    add_up_reference(expected, down_reference(x_TK, case.factors, runs), case.factors, runs)
    with poisoned_memory():
        launch_up(y_TN, launch_down(x_TK, case.factors, runs), case.factors, runs)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(y_TN, expected, atol=tolerance, rtol=tolerance)
    assert (y_TN[-2:] == expected[-2:]).all()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "groups", "dim"), [(8, 2, 32), (3, 3, 20), (18, 1, 16)])
def test_kernels_of_attention(heads: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(heads)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    lens = [1, 64, 70, 3]
    rows = torch.randperm(200, generator=generator)[: sum(lens)]
    begins = torch.tensor([0, *lens[:-1]]).cumsum(0)
    tables = (value.int().to(DEVICE) for value in (begins, torch.tensor(lens), rows))
    k_CGD, v_CGD = draw(200, groups, dim), draw(200, groups, dim)
    operands = draw(4, heads, dim), k_CGD, v_CGD, KeySpans(*tables)
    expected = attend_cached_reference(*operands, dim**-0.5)
    with poisoned_memory():
        found = launch_attention(*operands, dim**-0.5)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
