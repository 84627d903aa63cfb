"""One multi-adapter linear with random weights, on any device, beside its fp64 definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.helpers.layout_sites import SPEC as SMALL
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.linear import LinearLayout, multi_lora_linear
from tlora_megatron.layers.shardings import FoldStrategy
from tlora_megatron.layers.sites import Site, make_site
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.dropout import dropout_reference, mix_ints
from tlora_megatron.ops.lora.linear_ops import LinearOps
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch

SPEC = replace(SMALL, num_layers=2, num_heads=6, num_kv_heads=3, ffn_size=36)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
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
        self,
        linear: str,
        dtype: torch.dtype,
        *,
        spec: ModelSpec = SPEC,
        loras: Sequence[LoraSpec] = JOBS,
        device: str = "cpu",
        seed: int = 0,
        ops: LinearOps | None = None,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.device = torch.device(device)
        self.site: Site = make_site(spec, 1, linear, 0, 1)
        self.bank = AdapterBank([self.site], loras, dtype=dtype, device=self.device, ops=ops)
        adapters = []
        for index, lora in enumerate(loras):
            slab = self.bank.new_slab(lora)
            slab.master.normal_(generator=generator)
            slab.master.copy_(slab.master.to(dtype))
            adapters.append(Adapter(name=f"job{index}", lora=lora, slab=slab))
        self.bank.install(adapters)
        self.strategy = FoldStrategy(self.bank, self.site, LinearLayout())
        shape = (self.site.out_size, self.site.in_size)
        self.generator = generator
        self.dtype = dtype
        self.weight = self.draw(*shape)
        self.bias = self.draw(shape[0])

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def view(self, lengths: Sequence[int], *, num_tokens: int, training: bool) -> MicroBatchView:
        documents = [Document(slot=s, length=n, first_token=3) for s, n in enumerate(lengths) if n]
        keys = [mix_ints(s, 5) for s in range(len(lengths))] if training else []
        return pack_micro_batch(
            documents, num_slots=len(lengths), num_tokens=num_tokens, dropout_keys=keys
        )

    def run(
        self, x: torch.Tensor, dy: torch.Tensor, view: MicroBatchView
    ) -> dict[str, torch.Tensor]:
        x = x.clone().requires_grad_()
        y = multi_lora_linear(x, self.weight, self.bias, self.strategy, view)
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, **self.gradients()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Takes every factor's gradient out of its slab."""
        found = {}
        for adapter in self.bank.adapters:
            layout = adapter.slab.layout
            adapter.slab.collect_grad()
            views = layout.views(adapter.slab.grad.clone())
            adapter.slab.zero_grad()
            for factor, view in zip(layout.factors, views, strict=True):
                found[f"{adapter.name}.{factor.name}"] = view
        return found

    def reference(
        self, x: torch.Tensor, dy: torch.Tensor, view: MicroBatchView
    ) -> dict[str, torch.Tensor]:
        """The same by the definition: each target on its own columns, fp64, autograd."""
        x64 = x.double().flatten(0, -2).requires_grad_()
        keep = None
        if view.rows.dropout_keys:
            slots = view.rows.row_slots(self.device)
            probabilities = [a.lora.dropout for a in self.bank.adapters]
            p = torch.tensor([*probabilities, 0.0], device=self.device)
            ones = torch.ones(x64.shape, dtype=torch.float32, device=self.device)
            keys = view.rows.row_keys(ones.device)
            keep = dropout_reference(ones, keys, p[slots], mix_ints(self.site.index), 0).double()
        branch = x64 if keep is None else x64 * keep
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
                    factors[slot] = pair["lora_a"].t(), pair["lora_b"], adapter.lora.scaling
            if not factors:
                continue
            deltas = []
            for slot, run in enumerate(branch.split(view.rows.lengths)):
                no_a, no_b = run.new_zeros(run.shape[1], 1), run.new_zeros(1, shard.columns.size)
                a_KR, b_RN, scaling = factors.get(slot, (no_a, no_b, 0.0))
                deltas.append(scaling * (run @ a_KR @ b_RN))
            whole = torch.zeros_like(y)
            columns = torch.arange(y.shape[1], device=self.device)[None]
            y = y + whole.index_add(1, shard.columns.read(columns)[0], torch.cat(deltas))
        y.backward(dy.double().flatten(0, -2))
        grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
        return {"y": y.detach(), "dx": x64.grad, **grads}
