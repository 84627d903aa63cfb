"""The multi-adapter linear against its one-line definition, every output and gradient by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tlora_megatron.job import LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.linear import AdapterBranch, MultiLoRALinear, TensorParallel
from tlora_megatron.layers.sites import Site, make_site
from tlora_megatron.model import ModelSpec
from tlora_megatron.ops.dropout import dropout, mix_ints
from tlora_megatron.ops.reference import Factors, multi_lora_linear_reference
from tlora_megatron.ops.segments import Document, MicroBatchView, pack_micro_batch

SPEC = ModelSpec(
    model_type="llama",
    num_layers=2,
    hidden_size=24,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    ffn_size=36,
    vocab_size=32,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
)
NO_TP = TensorParallel(group=None, gather_input=False, reduce_dgrad=False)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
JOBS = (
    LoraSpec(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "o_proj", "up_proj")),
    LoraSpec(rank=24, alpha=3, dropout=0.3, target_modules=("linear_qkv", "linear_fc1")),
    LoraSpec(rank=1, alpha=1, dropout=0.1, target_modules=("k_proj", "gate_proj", "down_proj")),
    LoraSpec(rank=7, alpha=7, use_rslora=True),
)
WORKLOADS = {
    "distinct": (5, 9, 1, 17),
    "one adapter absent": (5, 0, 3, 8),
    "one adapter only": (0, 0, 13, 0),
    "no adapter at all": (0, 0, 0, 0),
    "skewed": (1, 257, 2, 63),
}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    scale = expected.norm().clamp(min=1e-30)
    return float((actual.double() - expected).norm() / scale)


class Case:
    """One site with random weights, in a dtype, and its reference in fp64."""

    def __init__(
        self, linear: str, dtype: torch.dtype, *, loras: Sequence[LoraSpec] = JOBS, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.site: Site = make_site(SPEC, 1, linear, 0, 1)
        self.bank = AdapterBank([self.site], loras, dtype=dtype, device=torch.device("cpu"))
        self.loras = loras
        adapters = []
        for index, lora in enumerate(loras):
            slab = self.bank.new_slab(lora)
            slab.master.normal_(generator=generator)
            slab.master.copy_(slab.master.to(dtype))
            adapters.append(Adapter(name=f"job{index}", lora=lora, slab=slab))
        self.bank.install(adapters)
        self.branch = AdapterBranch(self.bank, self.site)
        shape = (self.site.out_size, self.site.in_size)
        self.weight = torch.randn(shape, generator=generator).to(dtype)
        self.bias = torch.randn(shape[0], generator=generator).to(dtype)
        self.generator = generator
        self.dtype = dtype

    def view(self, lengths: Sequence[int], *, num_tokens: int, training: bool) -> MicroBatchView:
        documents = [Document(slot=s, length=n, first_token=3) for s, n in enumerate(lengths) if n]
        keys = [mix_ints(s, 5) for s in range(len(lengths))] if training else []
        return pack_micro_batch(
            documents, num_slots=len(lengths), num_tokens=num_tokens, dropout_keys=keys
        )

    def run(self, x: torch.Tensor, dy: torch.Tensor, view: MicroBatchView) -> dict[str, torch.Tensor]:
        x = x.clone().requires_grad_()
        y = MultiLoRALinear.apply(x, self.weight, self.bias, self.branch, view, NO_TP)
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, **self.gradients()}

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for slot, adapter in enumerate(self.bank.adapters):
            layout = adapter.slab.layout
            for factor, view in zip(
                layout.factors, layout.views(self.bank.take_gradient(slot)), strict=True
            ):
                found[f"{adapter.name}.{factor.name}"] = view
        return found

    def reference(
        self, x: torch.Tensor, dy: torch.Tensor, view: MicroBatchView
    ) -> dict[str, torch.Tensor]:
        """Each target on its own columns, fp64, autograd."""
        x64 = x.double().flatten(0, -2).requires_grad_()
        keep = None
        p = self.bank.row_dropout(view.rows)
        if p is not None:
            ones = torch.ones(x64.shape, dtype=torch.float32)
            keys = view.rows.row_keys(ones.device)
            keep = dropout(ones, keys, p, mix_ints(self.site.index), 0).double()
        y = torch.nn.functional.linear(x64, self.weight.double(), self.bias.double())
        leaves: dict[str, torch.Tensor] = {}
        for shard in self.site.targets:
            factors = {}
            for slot, adapter in enumerate(self.bank.adapters):
                pair = {}
                slab = adapter.slab
                for factor, view_ in zip(
                    slab.layout.factors, slab.layout.views(slab.master), strict=True
                ):
                    if factor.shard.target == shard.target:
                        leaf = view_.double().clone().requires_grad_()
                        leaves[f"{adapter.name}.{factor.name}"] = pair[factor.which] = leaf
                if pair:
                    factors[slot] = Factors(pair["lora_a"], pair["lora_b"].t(), adapter.lora.scaling)
            if not factors:
                continue
            zero = torch.zeros(shard.columns.size, x64.shape[1], dtype=torch.float64)
            delta = multi_lora_linear_reference(x64, zero, None, factors, view.rows, keep)
            whole = torch.zeros_like(y)
            columns = torch.arange(y.shape[1])[None]
            y = y + whole.index_add(1, shard.columns.read(columns)[0], delta)
        y.backward(dy.double().flatten(0, -2))
        grads = {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in leaves.items()}
        return {"y": y.detach(), "dx": x64.grad, **grads}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("linear", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_every_output_and_gradient_equals_the_reference(
    linear: str, workload: str, training: bool, dtype: torch.dtype
) -> None:
    case = Case(linear, dtype)
    lengths = WORKLOADS[workload]
    num_tokens = sum(lengths) + 6
    view = case.view(lengths, num_tokens=num_tokens, training=training)
    x = torch.randn(num_tokens, 1, case.site.in_size, generator=case.generator).to(dtype)
    dy = torch.randn(num_tokens, 1, case.site.out_size, generator=case.generator).to(dtype)
    actual, expected = case.run(x, dy, view), case.reference(x, dy, view)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        got = actual[name].reshape(value.shape)
        assert torch.isfinite(got).all(), name
        assert error(got, value) < TOLERANCE[dtype], name


def test_a_nan_stays_in_its_own_rows_and_gradients() -> None:
    case = Case("linear_qkv", torch.float32)
    lengths = WORKLOADS["distinct"]
    view = case.view(lengths, num_tokens=40, training=True)
    x = torch.randn(40, 1, case.site.in_size, generator=case.generator)
    dy = torch.randn(40, 1, case.site.out_size, generator=case.generator)
    clean = case.run(x, dy, view)
    x[6:8] = float("nan")
    dy[7] = float("inf")
    dirty = case.run(x, dy, view)
    for name, value in clean.items():
        if name.startswith("job1."):
            assert not torch.isfinite(dirty[name]).all(), name
        elif name in ("y", "dx"):
            rows = [r for r in range(40) if r not in (6, 7)]
            assert torch.equal(dirty[name][rows], value[rows]), name
        else:
            assert torch.equal(dirty[name], value), name


def test_gradients_of_a_batch_under_way_survive_a_neighbour_leaving() -> None:
    case = Case("linear_fc1", torch.float32)
    view = case.view(WORKLOADS["distinct"], num_tokens=32, training=False)
    x = torch.randn(32, 1, case.site.in_size, generator=case.generator)
    dy = torch.randn(32, 1, case.site.out_size, generator=case.generator)
    alone = case.run(x, dy, view)
    case.run(x, dy, view)
    y = MultiLoRALinear.apply(x.requires_grad_(), case.weight, None, case.branch, view, NO_TP)
    y.backward(dy)
    case.bank.install([a for a in case.bank.adapters if a.name != "job1"])
    after = case.gradients()
    assert after
    for name, grad in after.items():
        assert torch.equal(grad, alone[name]), name


def test_dropout_is_the_same_for_a_token_wherever_it_is_packed() -> None:
    case = Case("linear_fc2", torch.float32, loras=(JOBS[1], JOBS[3]))
    first = case.view((6, 4), num_tokens=16, training=True)
    document = Document(slot=0, length=6, first_token=3)
    second = pack_micro_batch(
        [Document(slot=0, length=2, first_token=90), document],
        num_slots=2,
        num_tokens=32,
        dropout_keys=first.dropout_keys,
    )
    x = torch.randn(6, case.site.in_size)
    keys_first = first.rows.row_keys(x.device)[:6]
    keys_second = second.rows.row_keys(x.device)[2:8]
    assert torch.equal(keys_first, keys_second)
    p = torch.full((6,), 0.5)
    whole = dropout(x, keys_first, p, 7, 0)
    shard = dropout(x[:, 10:], keys_second, p, 7, 10)
    assert torch.equal(whole[:, 10:], shard)
    assert 0.3 < (whole == 0).float().mean() < 0.7
