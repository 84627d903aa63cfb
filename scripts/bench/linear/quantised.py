"""FP8 bases of the layer benchmark: the frozen linear by itself, and what it must compute."""

from __future__ import annotations

import torch

from scripts.bench.linear.check import FrozenRows
from scripts.bench.linear.workload import Backward, BufferSet, Forward, Frozen, Workload
from tlora_megatron.ops.quantised.definition import forward_product, input_gradient
from tlora_megatron.ops.quantised.rows import encode_rows
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight

FP8 = ("frozen_fp8", "tlora_fp8")
"""Providers over an FP8 base; their times hold what they quantise."""


def quantised_bases(workload: Workload) -> tuple[QuantWeight, ...]:
    """The weights of all buffer sets in FP8."""
    return tuple(encode_weight(operands.weight_NK) for operands in workload.sets)


class FrozenFp8(Frozen):
    """The FP8 linear without adapters."""

    name = "frozen_fp8"

    def __init__(self, workload: Workload, bases: tuple[QuantWeight, ...]) -> None:
        super().__init__(workload)
        self._bases = bases

    def forward(self, index: int) -> Forward:
        """`fq(x) W^T`."""
        return Forward(self._bases[index].forward(self._sets[index].x_TK), None)

    def backward(self, index: int, forward: Forward) -> Backward:
        """`fq(dy) W`."""
        return Backward(self._bases[index].dgrad(self._sets[index].dy_TN), None)


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
