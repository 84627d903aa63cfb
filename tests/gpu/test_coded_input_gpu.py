"""Codes that travel in the place of x, on one GPU: a rank after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.coded_ranks import LAYOUT, Ranks
from tests.helpers.linear_case import JOBS, SPEC, Case
from tlora_megatron.layers.shardings import FoldStrategy
from tlora_megatron.ops.lora.kernel_choice import Kernels, choose_ops, problem_of
from tlora_megatron.ops.quantised.rows import GROUP
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight

pytestmark = pytest.mark.gpu

WIDE = replace(SPEC, hidden_size=512, num_heads=4, num_kv_heads=2, head_dim=128)
ROWS = 730
"""The second rank begins inside of a tile."""


@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize("kernels", ["triton", "cuda"])  # cuBLAS chooses by the number of rows
def test_products_are_those_of_gathered_rows_to_the_bit(
    kernels: Kernels, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    problem = problem_of(kernels, device, dtype)
    if problem is not None:
        pytest.skip(problem)
    monkeypatch.setenv("TLORA_KERNELS", kernels)
    ops = choose_ops(device, dtype)
    case = Case("linear_qkv", dtype, spec=WIDE, loras=JOBS, device=str(device), ops=ops)
    view = case.view((100, 290, 3, 310), num_tokens=ROWS, training=True)
    base = encode_weight(case.weight)
    if kind == "block":
        blocks = torch.rand(*(size // GROUP for size in base.shape), device=device) + 0.5
        base = QuantWeight(base.codes_NK, blocks / 448)
    ranks = Ranks(case, view, case.draw(ROWS, case.site.in_size), base.group)
    ranks.stand_in(monkeypatch)
    expected, _ = ranks.bound().forward(ranks.x_TK, base, case.bias)
    assert torch.isfinite(expected).all()
    for y in ranks.products(base, FoldStrategy(case.bank, case.site, LAYOUT)):
        assert torch.equal(y, expected)
    assert 0 < ranks.bytes < 0.6 * ranks.x_TK.nbytes
