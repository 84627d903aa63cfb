"""`CudaOps` where ranks share adapters as S-LoRA does, its launches executed on the CPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.helpers.cuda_cases import CASES
from tests.helpers.item_machine import ItemMachine
from tests.helpers.kernel_case import (
    make_case,
    make_rows,
    poisoned_memory,
    reference,
    run_shared,
)
from tests.helpers.linear_case import error
from tlora_megatron.ops.rank_places import gather_or_zero

IN_SIZE = 136


@pytest.fixture
def cuda_ops() -> ModuleType:
    pytest.importorskip("triton")
    from tlora_megatron.ops import cuda_ops

    return cuda_ops


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", ["ragged segments", "missing targets", "ranks 1 to 256"])
def test_ranks_that_share_make_the_definition(
    name: str, dropout: bool, cuda_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, ranks, lengths, padding = CASES[name]
    p = tuple(0.1 + 0.2 * (i % 3) for i in range(len(ranks))) if dropout else ()
    case = make_case(ranks, columns, IN_SIZE, dtype=torch.float64, dropout=p)
    rows = make_rows(lengths, padding)
    generator = torch.Generator().manual_seed(1)
    x, dy = (
        torch.randn(rows.ends[-1], size, generator=generator, dtype=torch.float64)
        for size in (IN_SIZE, case.out_size)
    )
    machine = ItemMachine(case.factors)
    for kernel in ("rank_rows", "rank_sums", "gemm", "multiprocessors", "gemm_tile"):
        monkeypatch.setattr(cuda_ops, kernel, getattr(machine, kernel))
    monkeypatch.setattr(cuda_ops, "gather", gather_or_zero)
    with poisoned_memory():
        found = run_shared(cuda_ops.CudaOps(), case, x, dy, rows)
    expected = reference(case, x.clone(), dy, rows)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.isfinite(found[key]).all(), key
        assert error(found[key], value) < 1e-6, key
    assert machine.launches == ["rows", "rows", "gemm", "rows", *["gemm", "sums", "sums"] * 2]
