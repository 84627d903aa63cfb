"""`TorchOps`: portions of a job in one micro-batch leave what one after the other would."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.helpers.kernel_case import QKV, make_case, make_rows, portions_and_one_by_one
from tlora_megatron.ops.lora.torch_ops import TorchOps


def test_portions_add_up_as_micro_batches_one_after_another() -> None:
    ranks = [[4, 0, 17], [16, 16, 16], [0, 0, 0], [1, 40, 3]]
    case = make_case(ranks, QKV, 80, dtype=torch.float32, dropout=(0.3, 0.1, 0.5, 0.0))
    rows = make_rows((190, 7, 0, 61), 6, budget=400, cuts=(20, 130, 141, 210))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows.ends[-1], 80, generator=generator)
    dy = torch.randn(rows.ends[-1], case.out_size, generator=generator)
    together, alone = portions_and_one_by_one(TorchOps(), case, x, dy, rows)
    uncut = replace(rows, cuts=(), _cache={})
    whole, _ = portions_and_one_by_one(TorchOps(), case, x, dy, uncut)
    for name, grad in alone.items():
        assert torch.equal(together[name], grad), name
    assert not torch.equal(whole["dA[0][0]"], alone["dA[0][0]"]), "the order must matter here"
