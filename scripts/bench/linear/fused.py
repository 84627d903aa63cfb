"""The package's own multi-adapter linear as a provider of the layer benchmark.

The factors come out of an `AdapterBank` and the work is done by a `LinearOps`, as in training; only
the autograd function around them is left out, whose bookkeeping is on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from scripts.bench.linear.check import FrozenRows
from scripts.bench.linear.workload import (
    AdapterMix,
    Backward,
    BufferSet,
    FactorGrads,
    Forward,
    Frozen,
    SlotWeights,
    TargetWeights,
    Workload,
)
from tlora_megatron.config.job import HF_TARGETS, LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.ops.dropout import dropout_reference, mix_ints
from tlora_megatron.ops.lora.linear_ops import Base, LinearOps, SiteFactors
from tlora_megatron.ops.lora.torch_ops import TorchOps
from tlora_megatron.ops.quantised.rows import encode_rows, hand_rows
from tlora_megatron.ops.quantised.weight import (
    QuantWeight,
    encode_weight,
    forward_product,
    input_gradient,
)
from tlora_megatron.ops.routing import Document, RowGroups, pack_micro_batch


def build_factors(workload: Workload, mix: AdapterMix) -> tuple[SiteFactors, ...]:
    """Factors for every buffer set: the branch is about half of the frozen output.

    All share one `RankLayout` and so one set of work lists, as the layers of a model do.
    """
    generator = torch.Generator(workload.device).manual_seed(3)
    sets = [_bank_factors(workload, mix, generator) for _ in workload.sets]
    return tuple(dataclasses.replace(f, layout=sets[0].layout) for f in sets)


def _bank_factors(workload: Workload, mix: AdapterMix, generator: torch.Generator) -> SiteFactors:
    site = workload.shape.site
    loras = [
        LoraSpec(rank=rank, alpha=scaling * rank, target_modules=HF_TARGETS)
        for rank, scaling in zip(mix.ranks, mix.scalings, strict=True)
    ]
    device = workload.device
    bank = AdapterBank([site], loras, dtype=workload.dtype, device=device, ops=TorchOps())
    adapters = []
    for index, lora in enumerate(loras):
        slab = bank.new_slab(lora)
        slab.master.normal_(generator=generator)
        std = {"lora_a": site.in_size**-0.5, "lora_b": 0.5 / (lora.scaling * lora.rank**0.5)}
        views = slab.layout.views(slab.master)
        torch._foreach_mul_(views, [std[factor.which] for factor in slab.layout.factors])
        adapters.append(Adapter(name=f"job{index}", lora=lora, slab=slab))
    bank.install(adapters)
    return bank.fused_factors[site.index]


def with_dropout(factors: tuple[SiteFactors, ...], p: float) -> tuple[SiteFactors, ...]:
    p_S = torch.full_like(factors[0].dropout, p)
    return tuple(dataclasses.replace(f, dropout=p_S, has_dropout=p > 0) for f in factors)


def row_groups(mix: AdapterMix, *, dropout: float) -> RowGroups:
    """The rows of a micro-batch without padding, one document an adapter."""
    slots = range(len(mix.ranks))
    view = pack_micro_batch(
        [Document(slot=slot, length=mix.lengths[slot]) for slot in slots],
        num_slots=len(slots),
        num_tokens=sum(mix.lengths),
        dropout_keys=[mix_ints(slot, 5) for slot in slots] if dropout else (),
    )
    return view.rows


class FusedLinear:
    """A `LinearOps` over the buffer sets of a workload, whose bases may be quantised."""

    def __init__(
        self,
        name: str,
        ops: LinearOps,
        workload: Workload,
        factors: tuple[SiteFactors, ...],
        rows: RowGroups,
        bases: Sequence[Base],
    ) -> None:
        self.name = name
        self._sets, self._bases = workload.sets, bases
        self._factors, self._rows = factors, rows
        self._bound = [ops.bind(each, rows) for each in factors]
        self._window = (0, workload.tokens)

    def forward(self, index: int) -> Forward:
        operands = self._sets[index]
        y_TN, s = self._bound[index].forward(operands.x_TK, self._bases[index], None)
        return Forward(y_TN, s)

    def backward(self, index: int, forward: Forward) -> Backward:
        operands, bound = self._sets[index], self._bound[index]
        ds = bound.backward_up(operands.dy_TN, forward.saved)
        dx_TK = bound.product_dgrad(operands.dy_TN, ds, self._bases[index])
        bound.backward_down(operands.x_TK, operands.dy_TN, forward.saved, ds, self._window)
        # dS is kept, as s is, so that no call writes where another has just written.
        return Backward(dx_TK, ds)

    def weights(self) -> tuple[SlotWeights, ...]:
        """Set 0's compute copies, without the rows that fill a chunk."""
        factors = self._factors[0]
        scaling = factors.scaling.tolist()
        return tuple(
            SlotWeights(scaling[slot], tuple(_targets(factors, slot)))
            for slot in range(len(factors.layout.ranks))
        )

    def keep(self, forward: Forward) -> torch.Tensor | None:
        factors, x_TK = self._factors[0], self._sets[0].x_TK
        if not factors.has_dropout:
            return None
        ones = torch.ones(x_TK.shape, device=x_TK.device)
        p_T = factors.dropout[self._rows.row_slots(x_TK.device)]
        keys_T = self._rows.row_keys(x_TK.device)
        return dropout_reference(ones, keys_T, p_T, factors.dropout_key, factors.first_column)

    def clear(self) -> None:
        for factors in self._factors:
            for grads in (factors.grad_a, factors.grad_b):
                torch._foreach_zero_([g for slot in grads for g in slot if g is not None])

    def gradients(self, backward: Backward) -> tuple[tuple[FactorGrads, ...], ...]:
        factors = self._factors[0]
        found = []
        for grad_a, grad_b in zip(factors.grad_a, factors.grad_b, strict=True):
            pairs = zip(grad_a, grad_b, strict=True)
            found.append(tuple(FactorGrads(a, b) for a, b in pairs if not (a is None or b is None)))
        return tuple(found)


def _targets(factors: SiteFactors, slot: int) -> list[TargetWeights]:
    layout = factors.layout
    found = []
    for p, rank in enumerate(layout.ranks[slot]):
        a_begin, b_begin = layout.a_begin[slot][p], layout.b_begin[slot][p]
        lora_a_RK = factors.lora_a[a_begin : a_begin + rank]
        lora_b_RN = factors.lora_b[p][b_begin : b_begin + rank]
        found.append(TargetWeights(factors.columns[p], lora_a_RK, lora_b_RN))
    return found


FP8 = ("frozen_fp8", "tlora_fp8", "tlora_fp8_given")
"""Providers over an FP8 base. The times of the first two hold what they quantise; the last is given
the codes of x and dy, as in a layer, where the kernels before the linear make them."""


def quantised_bases(workload: Workload) -> tuple[QuantWeight, ...]:
    return tuple(encode_weight(operands.weight_NK) for operands in workload.sets)


class FrozenFp8(Frozen):
    name = "frozen_fp8"

    def __init__(self, workload: Workload, bases: tuple[QuantWeight, ...]) -> None:
        super().__init__(workload)
        self._bases = bases

    def forward(self, index: int) -> Forward:
        return Forward(self._bases[index].forward(self._sets[index].x_TK), None)

    def backward(self, index: int, forward: Forward) -> Backward:
        return Backward(self._bases[index].dgrad(self._sets[index].dy_TN), None)


class GivenRows(FusedLinear):
    """The FP8 linear with adapters whose input and gradient come with their codes."""

    def quantise(self, bases: Sequence[QuantWeight]) -> None:
        self._given = [
            (base, base.rows_of(operands.x_TK), base.gradient_rows_of(operands.dy_TN))
            for base, operands in zip(bases, self._sets, strict=True)
        ]

    def forward(self, index: int) -> Forward:
        hand_rows(self._sets[index].x_TK, self._given[index][1])
        return super().forward(index)

    def backward(self, index: int, forward: Forward) -> Backward:
        base, _, rows = self._given[index]
        hand_rows(self._sets[index].dy_TN, rows, base.fold_N)
        return super().backward(index, forward)


class QuantisedRows(FrozenRows):
    """Results of the FP8 linear alone at sampled rows, by its definition."""

    def __init__(self, operands: BufferSet, base: QuantWeight) -> None:
        super().__init__(operands)
        self._base = base

    def _computed(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        base, wide = self._base, torch.float32
        x = encode_rows(self._operands.x_TK[index], group=base.group)
        dy = encode_rows(self._operands.dy_TN[index], fold_K=base.fold_N)
        return (
            forward_product(x, base.codes_NK, base.scales, wide),
            input_gradient(dy, base.codes_NK, base.scales, wide),
        )
