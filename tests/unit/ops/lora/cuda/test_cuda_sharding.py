"""`CudaOps` where ranks share adapters as S-LoRA does, its launches executed on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.helpers.cuda_cases import CASES
from tests.helpers.item_machine import ItemMachine
from tests.helpers.kernel_case import poisoned_memory, reference, run_shared
from tests.helpers.layout_sites import SPEC
from tests.unit.ops.lora.cuda.test_cuda_ops import check, make
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.model.layout import LoraSharding, ParallelLayout
from tlora_megatron.ops.lora import cuda_ops
from tlora_megatron.ops.lora.rank_places import gather_or_zero
from tlora_megatron.ops.lora.torch_ops import TorchOps


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    ("name", "parts"),
    [("ragged segments", 2), ("missing targets", 2), ("missing targets", 4), ("ranks 1 to 256", 2)],
)
def test_ranks_that_share_make_the_definition(
    name: str, parts: int, dropout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_slots = len(CASES[name][1])
    p = tuple(0.1 + 0.2 * (i % 3) for i in range(num_slots)) if dropout else ()
    case, rows, x, dy = make(name, p)
    machine = ItemMachine(case.factors)
    for kernel in ("rank_rows", "rank_sums", "gemm", "multiprocessors", "gemm_tile"):
        monkeypatch.setattr(cuda_ops, kernel, getattr(machine, kernel))
    monkeypatch.setattr(cuda_ops, "gather", gather_or_zero)
    with poisoned_memory():
        found = run_shared(cuda_ops.CudaOps(TorchOps()), case, x, dy, rows, parts)
    check(found, reference(case, x, dy, rows))
    each = ["gemm", "sums", "sums"]
    assert machine.launches == [*["rows"] * parts, "gemm", "rows", *each * parts]


@pytest.mark.parametrize("sharding", ["fold", "s_lora"])
@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize(("hidden", "ffn"), [(512, 1536), (512, 520), (36, 108), (72, 256)])
def test_what_the_kernels_take_lies_at_16_bytes(
    hidden: int, ffn: int, tp_size: int, sharding: LoraSharding
) -> None:
    """Else Triton takes it, for bulk copies would fault; and of a linear's two factors, both."""
    spec = replace(SPEC, hidden_size=hidden, head_dim=hidden // 4, ffn_size=ffn)
    layout = ParallelLayout(tp_size=tp_size, lora_sharding=sharding)
    taken = []
    for tp_rank in range(tp_size):
        sites = stage_sites(spec, layout, tp_rank=tp_rank, pp_rank=0)
        loras = [LoraSpec(rank=rank) for rank in (1, 6, 7, 16)]
        bank = AdapterBank(sites, loras, dtype=torch.bfloat16, device=torch.device("cpu"))
        bank.install(
            [Adapter(name=str(i), lora=r, slab=bank.new_slab(r)) for i, r in enumerate(loras)]
        )
        for factors in (*bank.fused_factors.values(), *bank.s_lora_a_factors.values()):
            is_taken = factors.cached(cuda_ops.CudaSite).is_supported
            taken.append(is_taken)
            held = [t for t in (factors.lora_a, *factors.lora_b) if t.stride(0)]
            grads = [g for t in (factors.grad_a, factors.grad_b) for slot in t for g in slot]
            held += [g for g in grads if g is not None]
            rows = [row.data_ptr() for tensor in held for row in tensor]
            assert not is_taken or not any(address % 16 for address in rows)
        for index, own in bank.s_lora_a_factors.items():
            whole = bank.fused_factors[index]
            assert (
                own.cached(cuda_ops.CudaSite).is_supported
                == whole.cached(cuda_ops.CudaSite).is_supported
            )
    assert all(taken) == ((hidden, ffn) == (512, 1536))
    assert any(taken) or hidden < 512
