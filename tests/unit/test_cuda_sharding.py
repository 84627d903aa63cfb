"""`CudaOps` where ranks share adapters as S-LoRA does, its launches executed on the CPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.helpers.cuda_cases import CASES
from tests.helpers.item_machine import ItemMachine
from tests.helpers.kernel_case import (
    KernelCase,
    gradients,
    make_case,
    make_rows,
    own_factors,
    poisoned_memory,
    reference,
)
from tests.helpers.linear_case import error
from tlora_megatron.ops.factors import SiteFactors
from tlora_megatron.ops.rank_places import gather_or_zero
from tlora_megatron.ops.row_groups import RowGroups

IN_SIZE = 136


@pytest.fixture
def cuda_ops() -> ModuleType:
    pytest.importorskip("triton")
    from tlora_megatron.ops import cuda_ops

    return cuda_ops


def run_shared(
    cuda_ops: ModuleType, case: KernelCase, x: torch.Tensor, dy: torch.Tensor, rows: RowGroups
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Every output and gradient by name of two ranks that share `lora_a`, and the launches."""
    parts, window = 2, (0, len(x))
    machine, ops, monkeypatch = ItemMachine(case.factors), cuda_ops.CudaOps(), pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        for name in ("rank_rows", "rank_sums", "gemm", "multiprocessors", "gemm_tile"):
            patch.setattr(cuda_ops, name, getattr(machine, name))
        patch.setattr(cuda_ops, "gather", gather_or_zero)
        none = tuple(tuple(None for _ in slot) for slot in case.layout.ranks)
        whole = replace(case.factors, grad_a=none)
        owns: list[SiteFactors] = [own_factors(case.factors, k, parts) for k in range(parts)]
        taken = [ops.rank_places(own, rows).take(ops.down(x, own, rows)) for own in owns]
        places = ops.rank_places(whole, rows, parts)
        s = places.put(torch.cat(taken))
        y = ops.linear(x, case.weight_NK, case.bias_N, s, whole, rows)
        ds = ops.backward_up(dy, s, whole, rows)
        dx = -(dy @ case.weight_NK)  # every rank adds it
        for own, values in zip(owns, places.take(ds).chunk(parts), strict=True):
            own_ds = ops.rank_places(own, rows).put(values)
            dx += ops.dgrad(dy, own_ds, case.weight_NK, own, rows)
            ops.backward_down(x, dy, s, own_ds, own, rows, window, whole)
    found = gradients(case.factors)
    halved = {name: g / parts if name.startswith("dB") else g for name, g in found.items()}
    return {"y": y, "dx": dx, **halved}, machine.launches


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", ["ragged segments", "missing targets", "ranks 1 to 256"])
def test_ranks_that_share_make_the_definition(
    name: str, dropout: bool, cuda_ops: ModuleType
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
    with poisoned_memory():
        found, launches = run_shared(cuda_ops, case, x, dy, rows)
    expected = reference(case, x.clone(), dy, rows)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.isfinite(found[key]).all(), key
        assert error(found[key], value) < 1e-6, key
    assert launches == ["rows", "rows", "gemm", "rows", *["gemm", "sums", "sums"] * 2]
