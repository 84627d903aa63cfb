"""Adapters on routed experts on a GPU: kernels against their definition, and no waits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.helpers.expert_branch import (
    CASES,
    BranchCase,
    BranchShape,
    branch_case,
    check_close,
    gradients,
    placed,
    results,
    run_branch,
)
from tests.helpers.layout_sites import SPEC as SMALL
from tests.helpers.outer_case import definition, outer_case
from tests.helpers.outer_case import results as outer_results
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.integrations.megatron.layer.frozen_experts import FrozenExperts
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ExpertsSpec
from tlora_megatron.ops.experts.branch import TorchExpertOps, looped_products
from tlora_megatron.ops.lora.kernel_choice import cuda_problem
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups

pytestmark = pytest.mark.gpu


def _large() -> BranchShape:
    """Uneven rows of 32 experts and 5 adapters, some pairs without any."""
    draw = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 90, (32, 6), generator=draw)
    counts[torch.rand(32, 6, generator=draw) < 0.2] = 0
    counts[5, 2] = 700
    ranks = [((r, 0, 384), (r, 384, 384)) for r in (4, 16, 33, 64)]
    return BranchShape(
        counts=tuple(tuple(map(int, row)) for row in counts),
        ranks=(*ranks, ((8, 0, 768),)),
        in_size=1024,
        out_size=768,
    )


SHAPES = {**CASES, "large": _large()}


def triton_results(case: BranchCase) -> dict[str, Tensor]:
    from tlora_megatron.ops.experts.triton_products import TritonExpertOps

    return results(TritonExpertOps(), case)


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_the_definition(name: str) -> None:
    poison = torch.full((1 << 24,), torch.nan, device="cuda")
    del poison
    expected = results(TorchExpertOps(), branch_case(SHAPES[name], torch.float64))
    found = triton_results(branch_case(SHAPES[name], torch.bfloat16, "cuda"))
    # What bf16 rounds: the values drawn are bf16 already, s and the results are rounded once.
    check_close(found, expected, 1e-2)


TAKEN = [name for name, shape in SHAPES.items() if not (shape.in_size | shape.out_size) % 8]
CUDA = cuda_problem(torch.device("cuda")) if torch.cuda.is_available() else "no GPU"
NEEDS_CUDA = pytest.mark.skipif(CUDA is not None, reason=str(CUDA))


@NEEDS_CUDA
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("adapted", [True, False], ids=["adapters", "base alone"])
def test_one_gemm_computes_base_and_adapters(name: str, adapted: bool) -> None:
    shape = SHAPES[name]
    exact, case = branch_case(shape, torch.float64), branch_case(shape, torch.bfloat16, "cuda")
    weight = (torch.randn(len(shape.counts), shape.out_size, shape.in_size) / 16).bfloat16()
    counts = exact.runs.counts_L
    base = looped_products(exact.x, weight.double().transpose(1, 2), counts)
    dbase = looped_products(exact.dy, weight.double(), counts)
    expected = {"y": base, "dx": dbase}
    if adapted:
        run_branch(TorchExpertOps(), exact._replace(y=base, dx=dbase))
        expected |= gradients(exact)
    poison = torch.full((1 << 24,), torch.nan, device="cuda")
    del poison
    check_close(run_linear(case, weight.cuda(), adapted=adapted), expected, 1e-2)


def run_linear(case: BranchCase, weight: Tensor, *, adapted: bool = True) -> dict[str, Tensor]:
    """Runs a linear and its adapters forward and backward; returns results by name, on the CPU."""
    from tlora_megatron.ops.experts.choice import expert_linear, expert_linear_dgrad

    factors = case.factors if adapted else None
    x, dy = placed(case.x), placed(case.dy)
    y, kept = expert_linear(case.x, weight, case.runs, factors, x)
    dx, add_sums = expert_linear_dgrad(case.dy, weight, kept, case.runs, factors, dy)
    assert (add_sums is not None) == adapted
    if add_sums is not None:
        add_sums(x)
    return {"y": y.cpu(), "dx": dx.cpu()} | (gradients(case) if adapted else {})


@pytest.mark.parametrize("kernels", ["triton", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_job_has_the_same_bits_alone_and_again(kernels: str) -> None:
    shape = SHAPES["large"]
    weight = (torch.randn(len(shape.counts), shape.out_size, shape.in_size) / 16).bfloat16().cuda()

    def run(only: int | None) -> dict[str, Tensor]:
        case = branch_case(shape, torch.bfloat16, "cuda", only=only)
        return run_linear(case, weight) if kernels == "cuda" else triton_results(case)

    alone, beside, again = map(run, (2, None, None))
    for name, value in beside.items():
        assert torch.equal(again[name], value), name
        if name.startswith("slot 2"):
            assert torch.equal(alone[name], value), name


def test_a_layer_s_kernels_never_wait() -> None:
    from tlora_megatron.ops.experts.triton_products import TritonExpertOps

    ops, case = TritonExpertOps(), branch_case(SHAPES["large"], torch.bfloat16, "cuda")
    results(ops, case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_branch(ops, case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


SPEC = replace(
    SMALL, model_type="qwen3_moe", num_layers=1, hidden_size=512, num_heads=4, num_kv_heads=2,
    head_dim=128, ffn_size=256, vocab_size=64,
    experts=ExpertsSpec(num_experts=16, top_k=4, ffn_size=256, normalizes=True),
)  # fmt: skip
OWN = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
LORAS = (
    LoraSpec(rank=4, target_modules=OWN),
    LoraSpec(rank=64, alpha=16, target_modules=OWN),
    LoraSpec(rank=4, target_modules=("q_proj",)),
    LoraSpec(rank=24, target_modules=("experts.linear_fc1", "experts.linear_fc2")),
)


def block_results() -> dict[str, Tensor]:
    """Output, dx and gradients of a block of experts with four jobs, two of whose rows are one."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    config = SimpleNamespace(
        hidden_size=SPEC.hidden_size,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
    )
    assert SPEC.experts is not None
    experts = FrozenExperts(config, spec=SPEC.experts, ep_size=1, expert_tp=1)
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, 0.05)
    sites = stage_sites(SPEC, ParallelLayout(), tp_rank=0, pp_rank=0)
    bank = AdapterBank(sites, LORAS, dtype=torch.bfloat16, device=device)
    adapters = []
    for number, lora in enumerate(LORAS):
        slab = bank.new_slab(lora)
        slab.put("master", torch.randn(slab.layout.numel, device=device) / 10)
        adapters.append(Adapter(name=f"job{number}", lora=lora, slab=slab))
    bank.install(adapters)
    for site in bank.sites:
        if site.experts is not None:
            name = site.linear.replace("experts_", "linear_")
            getattr(experts.experts, name).bind_adapters(bank, site)
    lengths = (700, 1, 300, 513)
    documents = [Document(slot=slot, length=length) for slot, length in enumerate(lengths)]
    view = pack_micro_batch(documents, num_slots=len(LORAS), num_tokens=1536)
    x = torch.randn(1536, 1, SPEC.hidden_size, device=device).bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    with use_micro_batch(view):
        y, _ = experts(x)
        y.backward(dy)
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    for adapter in adapters:
        for name, grad in adapter.slab.grad_views.items():
            found[f"{adapter.name} {name}"] = grad
    return {name: value.double().cpu() for name, value in found.items()}


def test_a_block_is_what_torch_s_products_give(
    groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = block_results()
    monkeypatch.setenv("TLORA_KERNELS", "torch")
    expected = block_results()
    moved = [name for name, value in expected.items() if value.any()]
    # y, dx, and of each of the three jobs on experts all factors.
    assert len(moved) == 2 + 6 + 6 + 4
    check_close(found, expected, 2e-2)


@pytest.mark.parametrize("num_rows", [1, 63, 257])
def test_factors_that_experts_share_are_the_definition(num_rows: int) -> None:
    found = outer_results(outer_case(num_rows, torch.bfloat16, "cuda"))
    check_close(found, definition(outer_case(num_rows, torch.float64)), 1e-2)
