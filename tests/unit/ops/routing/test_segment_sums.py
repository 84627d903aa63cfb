"""Sums over runs of rows: right, and the same wherever a run lies."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="runs in the process of test_interpreted_kernels",
)
@pytest.mark.parametrize("first", [0, 1, 333])
def test_the_kernel_adds_a_run_in_an_order_of_its_own(first: int) -> None:
    module = importlib.import_module("tlora_megatron.ops.segment_sums_triton")
    generator = torch.Generator().manual_seed(0)
    own = torch.rand(2500, generator=generator)
    values = torch.cat([torch.rand(first, generator=generator), own, torch.tensor([torch.nan])])
    ends = torch.tensor([first, first + 2500, first + 2500, first + 2501])
    sums = module.launch_segment_sums(values.to(DEVICE), ends.to(DEVICE))
    alone = module.launch_segment_sums(own.to(DEVICE), torch.tensor([2500], device=DEVICE))
    assert torch.equal(sums[1], alone[0])
    assert sums[1].item() == pytest.approx(own.double().sum().item(), rel=1e-7)
    assert sums[2].item() == 0
    assert sums[3].isnan()
