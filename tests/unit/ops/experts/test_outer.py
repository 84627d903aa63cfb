"""Products of factors that experts share, against autograd in fp64; rows of adapters."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers.expert_branch import check_close
from tests.helpers.outer_case import definition, outer_case, results
from tlora_megatron.ops.experts.choice import token_runs

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Of bfloat16: rank columns are rounded where they are made, summed and scaled."""


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 63, 257])
def test_outputs_and_gradients_are_the_definition(num_rows: int, dtype: torch.dtype) -> None:
    case = outer_case(num_rows, dtype)
    check_close(results(case), definition(outer_case(num_rows, torch.float64)), BOUNDS[dtype])


def test_rows_of_a_window_keep_their_adapters() -> None:
    ends = (3, 3, 10, 12)  # the second slot has no rows, the last rows no adapter
    for begin, end in itertools.combinations(range(13), 2):
        runs = token_runs(ends, slice(begin, end)).of_adapters
        found = {row: run.slot for run in runs for row in range(run.begin, run.end)}
        slots = [0] * 3 + [2] * 7 + [None] * 2
        expected = {n: slot for n, slot in enumerate(slots[begin:end]) if slot is not None}
        assert found == expected
        assert all(run.expert == 0 for run in runs)
