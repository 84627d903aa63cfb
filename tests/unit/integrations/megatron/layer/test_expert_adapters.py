"""One block of routed experts with several jobs' adapters, against PEFT on each job's rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.helpers.oracle_experts import expert_factor, mask_gradients, peft_fields, share_outer
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.integrations.megatron import cpu
from tlora_megatron.integrations.megatron.layer.frozen_experts import FrozenExperts
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import factor_names, factor_shape
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ExpertsSpec, ModelSpec
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")

CPU = torch.device("cpu")
HIDDEN, FFN, EXPERTS, TOP_K = 32, 24, 4, 2
SPEC = ModelSpec(
    model_type="qwen3_moe", num_layers=1, hidden_size=HIDDEN, num_heads=4, num_kv_heads=2,
    head_dim=8, ffn_size=FFN, vocab_size=64, max_positions=64, norm_eps=1e-6, rope_theta=1e4,
    experts=ExpertsSpec(num_experts=EXPERTS, top_k=TOP_K, ffn_size=FFN, normalizes=True),
)  # fmt: skip
OWN = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
LORAS = {
    "own": LoraSpec(rank=2, alpha=4, target_modules=OWN),
    "absent": LoraSpec(rank=3, alpha=4, target_modules=OWN),
    "fused": LoraSpec(rank=8, alpha=8, expert_rank=5,
     target_modules=("experts.linear_fc1", "experts.linear_fc2")),
    "down": LoraSpec(rank=4, alpha=3, use_rslora=True, target_modules=("experts.down_proj",)),
    "attention": LoraSpec(rank=4, target_modules=("q_proj",)),
    "outer": LoraSpec(rank=3, alpha=6, expert_sharing="outer", target_modules=OWN),
    "outer, absent": LoraSpec(rank=6, expert_sharing="outer", target_modules=OWN),
    "outer, fused": LoraSpec(rank=4, alpha=6, expert_rank=5, expert_sharing="outer",
     target_modules=("experts.linear_fc1", "experts.linear_fc2")),
    "outer, down": LoraSpec(rank=4, alpha=3, use_rslora=True, expert_sharing="outer",
     target_modules=("experts.down_proj",)),
}  # fmt: skip
ROWS = {
    "own": 13, "absent": 0, "fused": 9, "down": 1, "attention": 4,
    "outer": 11, "outer, absent": 0, "outer, fused": 6, "outer, down": 7, "nobody": 5,
}  # fmt: skip
"""Rows of each job in the order of slots, then padding."""


class Block(nn.Module):
    """The experts of one layer of transformers, under the names that PEFT looks for."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=FFN, num_local_experts=EXPERTS,
            num_experts_per_tok=TOP_K, norm_topk_prob=True,
        )  # fmt: skip
        self.mlp = Qwen3MoeSparseMoeBlock(config)

    def forward(self, x_TH: Tensor) -> Tensor:
        out: Any = self.mlp(x_TH[None])
        return (out if isinstance(out, Tensor) else out[0])[0]


@pytest.fixture
def block() -> Block:
    block = Block()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    return block.requires_grad_(False)


@pytest.fixture
def bank() -> AdapterBank:
    sites = stage_sites(SPEC, ParallelLayout(), tp_rank=0, pp_rank=0)
    bank = AdapterBank(sites, list(LORAS.values()), dtype=torch.float32, device=CPU)
    adapters = []
    for name, lora in LORAS.items():
        slab = bank.new_slab(lora)
        slab.load(lambda factor, lora=lora: torch.randn(factor_shape(SPEC, factor, lora)) / 4)
        adapters.append(Adapter(name=name, lora=lora, slab=slab))
    bank.install(adapters)
    return bank


def ours(block: Block, bank: AdapterBank) -> FrozenExperts:
    """The same weights in a `FrozenExperts` that has the bank's adapters."""
    cpu.install()
    assert SPEC.experts is not None
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        params_dtype=torch.float32,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
    )
    experts = FrozenExperts(config, spec=SPEC.experts, ep_size=1, expert_tp=1)
    experts.router.weight.data.copy_(block.mlp.gate.weight)
    experts.experts.linear_fc1.stacked.copy_(block.mlp.experts.gate_up_proj)
    experts.experts.linear_fc2.stacked.copy_(block.mlp.experts.down_proj)
    for site in bank.sites:
        if site.experts is not None:
            linear: Any = getattr(experts.experts, site.linear.replace("experts_", "linear_"))
            linear.bind_adapters(bank, site)
    return experts


def spans() -> Iterator[tuple[str, slice]]:
    begin = 0
    for name, count in ROWS.items():
        yield name, slice(begin, begin + count)
        begin += count


def peft_alone(
    block: Block, bank: AdapterBank, name: str, x_TH: Tensor, dy_TH: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The output of a job's rows, their gradient, and those of its factors, by PEFT."""
    x_TH = x_TH.clone().requires_grad_()
    lora = LORAS.get(name)
    if lora is None or not lora.expert_targets:
        y_TH = block(x_TH)
        y_TH.backward(dy_TH)
        return y_TH.detach(), x_TH.grad, {}
    twin = Block()
    twin.load_state_dict(block.state_dict())
    model = get_peft_model(twin, LoraConfig(lora_dropout=0.0, **peft_fields(lora)))
    mask_gradients(model, lora)
    share_outer(model, lora)
    slot = list(LORAS).index(name)
    slab = bank.adapters[slot].slab
    for factor, master in zip(slab.layout.factors, slab.layout.views(slab.master), strict=True):
        value = master if factor.which == "lora_a" else master.mT
        expert_factor(model, factor.name).copy_(value)
    y_TH = model(x_TH)
    y_TH.backward(dy_TH)
    names = factor_names(SPEC, lora)
    return y_TH.detach(), x_TH.grad, {n: expert_factor(model, n, grad=True) for n in names}


def assert_equal(got: Tensor, expected: Tensor, what: str) -> None:
    """Equal up to the order of fp32 sums, whose error follows their terms, not the result."""
    error = float((got - expected).norm() / expected.norm())
    assert error < 5e-6, f"{what}: {error}"  # of 120 draws, the worst had 1.3e-6
    torch.testing.assert_close(
        got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()), msg=what
    )


@pytest.mark.parametrize("routing", ["spread", "two experts for all rows"])
def test_a_block_equals_peft_job_by_job(block: Block, bank: AdapterBank, routing: str) -> None:
    num_rows = sum(ROWS.values())
    x_TH, dy_TH = torch.randn(num_rows, HIDDEN), torch.randn(num_rows, HIDDEN)
    if routing != "spread":  # and the others without rows
        x_TH[:, 0] = 3.0
        block.mlp.gate.weight.data[:, 0] = torch.tensor([4.0, -4.0, 0.0, 8.0])
    documents = [
        Document(slot=slot, length=ROWS[name]) for slot, name in enumerate(LORAS) if ROWS[name]
    ]
    view = pack_micro_batch(documents, num_slots=len(LORAS), num_tokens=num_rows)
    x = x_TH[:, None].clone().requires_grad_()
    with use_micro_batch(view):
        y, _ = ours(block, bank)(x)
    y.backward(dy_TH[:, None])
    for slot, (name, rows) in enumerate(spans()):
        if not ROWS[name]:
            assert not bank.adapters[slot].slab.grad.any(), name
            continue
        expected, dx, grads = peft_alone(block, bank, name, x_TH[rows], dy_TH[rows])
        assert_equal(y[rows, 0], expected, name)
        assert_equal(x.grad[rows, 0], dx, f"{name} dx")
        for factor, grad in grads.items():
            got = bank.adapters[slot].slab.grad_views[factor]
            got = got if factor.endswith("lora_a") else got.mT
            assert_equal(got, grad, f"{name} {factor}")


class MultiplyAdds(TorchDispatchMode):
    """Counts those of matrix products."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_what_experts_share_multiplies_each_row_once(block: Block, bank: AdapterBank) -> None:
    experts, rows, counts = ours(block, bank), torch.randn(30, 1, HIDDEN), {}
    for name in ("outer", "attention"):
        document = Document(slot=list(LORAS).index(name), length=len(rows))
        view = pack_micro_batch([document], num_slots=len(LORAS), num_tokens=len(rows))
        with use_micro_batch(view), MultiplyAdds() as counted:
            y, _ = experts(rows.clone().requires_grad_())
            y.sum().backward()
        counts[name] = counted.count
    # Gate, up and down: rank 3 on the hidden side of every row, and inside its experts. Each
    # product comes once forward, and twice backward.
    a_row = 3 * 3 * (HIDDEN + TOP_K * FFN)
    assert counts["outer"] - counts["attention"] == 3 * len(rows) * a_row
