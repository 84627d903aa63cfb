"""FP8 bases of the layer benchmark: the frozen linear by itself, and what it must compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scripts.bench.linear.check import FrozenRows
from scripts.bench.linear.fused import FusedLinear
from scripts.bench.linear.workload import Backward, BufferSet, Forward, Frozen, Workload
from tlora_megatron.ops.quantised.rows import encode_rows, hand_rows
from tlora_megatron.ops.quantised.weight import (
    QuantWeight,
    encode_weight,
    forward_product,
    input_gradient,
)

FP8 = ("frozen_fp8", "tlora_fp8", "tlora_fp8_given")
"""Providers over an FP8 base. The times of the first two hold what they quantise; the last is given
the codes of x and dy, as in a layer, where the kernels before the linear make them."""


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


class GivenRows(FusedLinear):
    """The FP8 linear with adapters whose input and gradient come with their codes."""

    def quantise(self, bases: Sequence[QuantWeight]) -> None:
        """Makes the codes of all buffer sets."""
        self._given = [
            (base, base.rows_of(operands.x_TK), base.gradient_rows_of(operands.dy_TN))
            for base, operands in zip(bases, self._sets, strict=True)
        ]

    def forward(self, index: int) -> Forward:
        """y, and s as saved."""
        hand_rows(self._sets[index].x_TK, self._given[index][1])
        return super().forward(index)

    def backward(self, index: int, forward: Forward) -> Backward:
        """dx; dA and dB are added to the jobs' gradients."""
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
