"""Rows of a CPU's matrix products stay apart, on CPUs with AMX, too."""

from __future__ import annotations

from tests.helpers.launch import python

_PRODUCTS = """
import os
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
from tlora_megatron.ops.exactness import keep_rows_apart
keep_rows_apart()
import torch
for dtype in (torch.bfloat16, torch.float16):
    for inner in (31, 65, 97):
        x = torch.randn(64, inner).to(dtype)
        x[32] = float("nan")
        finite = (x @ torch.randn(inner, 32).to(dtype)).isfinite().all(dim=1)
        assert finite.sum() == 63, (dtype, inner, finite.logical_not().nonzero().flatten())
"""


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    python("-c", _PRODUCTS)
