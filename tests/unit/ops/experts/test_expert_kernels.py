"""Kernels of adapters on routed experts against their definition, in Triton's interpreter.

They run where `tests/unit/ops/test_interpreted_kernels.py` sets TRITON_INTERPRET.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from tests.helpers.expert_branch import CASES, BranchCase, branch_case, check_close, results
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


def _rows_of(case: BranchCase, slot: int) -> Tensor:
    counts = case.runs.counts_LS
    slots = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return slots.repeat_interleave(counts.flatten()) == slot
