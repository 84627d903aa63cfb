"""One kernel of the multi-adapter linear by itself, as far as `LinearOps` lets one: for `tune.py`.

What a kernel's work does not depend on is cut to a sliver, so that the frozen GEMM beside it costs
next to nothing: few output columns for `down`, `backward_down` and the `up` of dgrad, few input
features for `backward_up` and the `up` of forward.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch
from fused import build_factors, row_groups, with_dropout
from linear_shapes import AdapterMix
from linear_workload import BufferSet, Workload

from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.linear_ops import LinearOps

SLIVER = 128
Call = Callable[[], object]
Grads = tuple[tuple[torch.Tensor | None, ...], ...]


class KernelCase:
    """One shape, number of tokens and mix of adapters."""

    def __init__(self, workload: Workload, mix: AdapterMix, dropout: float) -> None:
        factors = with_dropout(build_factors(workload, mix), dropout)
        self.name = f"{workload.shape.name} {workload.tokens} x{len(mix.ranks)}"
        self.in_size = workload.shape.site.in_size
        self.out_size = workload.shape.site.out_size
        self._mix = mix
        self._dropout = dropout
        self.tokens = workload.tokens
        self._few_in = [_few_in(*pair) for pair in zip(workload.sets, factors, strict=True)]
        self._few_out = [_few_out(*pair) for pair in zip(workload.sets, factors, strict=True)]

    def calls(self, kernel: str, ops: LinearOps) -> list[Call]:
        """The kernel on every buffer set, with work lists made anew for the blocks in use."""
        rows = row_groups(self._mix, dropout=self._dropout)

        def forward(operands: BufferSet, factors: SiteFactors) -> tuple[torch.Tensor, torch.Tensor]:
            return ops.bind(factors, rows).forward(operands.x_TK, operands.weight_NK, None)

        def s_and_ds(
            operands: BufferSet, factors: SiteFactors
        ) -> tuple[torch.Tensor, torch.Tensor]:
            s = forward(operands, factors)[1]
            return s, ops.bind(factors, rows).backward_up(operands.dy_TN, s)

        def backward_up(operands: BufferSet, factors: SiteFactors) -> Call:
            s = forward(operands, factors)[1]
            return partial(ops.bind(factors, rows).backward_up, operands.dy_TN, s)

        def backward_down(operands: BufferSet, factors: SiteFactors) -> Call:
            s, ds = s_and_ds(operands, factors)
            x, dy, window = operands.x_TK, operands.dy_TN, (0, self.tokens)
            return partial(ops.bind(factors, rows).backward_down, x, dy, s, ds, window)

        def dgrad(operands: BufferSet, factors: SiteFactors) -> Call:
            _, ds = s_and_ds(operands, factors)
            return partial(ops.bind(factors, rows).dgrad, operands.dy_TN, ds, operands.weight_NK)

        if kernel == "down":
            return [partial(forward, *pair) for pair in self._few_out]
        if kernel == "backward_up":
            return [backward_up(*pair) for pair in self._few_in]
        if kernel == "backward_down":
            return [backward_down(*pair) for pair in self._few_out]
        assert kernel == "up", f"{kernel} must be a kernel of KernelConfig"
        ups = [partial(forward, *pair) for pair in self._few_in]
        return ups + [dgrad(*pair) for pair in self._few_out]


def _few_in(operands: BufferSet, factors: SiteFactors) -> tuple[BufferSet, SiteFactors]:
    """The linear of the first `SLIVER` input features."""
    cut = BufferSet(
        x_TK=operands.x_TK[:, :SLIVER].contiguous(),
        weight_NK=operands.weight_NK[:, :SLIVER].contiguous(),
        dy_TN=operands.dy_TN,
    )
    lora_a = factors.lora_a[:, :SLIVER].contiguous()
    grad_a = _fresh(factors.grad_a, lora_a.shape[1])
    return cut, dataclasses.replace(factors, lora_a=lora_a, grad_a=grad_a)


def _few_out(operands: BufferSet, factors: SiteFactors) -> tuple[BufferSet, SiteFactors]:
    """The linear of `SLIVER` output columns a target."""
    targets = range(len(factors.columns))
    width = min(SLIVER, *(c.size for c in factors.columns))
    stride = width * len(targets)
    columns = tuple(
        OutputColumns(groups=1, stride=stride, begin=p * width, width=width) for p in targets
    )
    cut = BufferSet(
        x_TK=operands.x_TK,
        weight_NK=operands.weight_NK[:stride].contiguous(),
        dy_TN=operands.dy_TN[:, :stride].contiguous(),
    )
    lora_b = tuple(b[:, :width].contiguous() for b in factors.lora_b)
    grad_b = _fresh(factors.grad_b, width)
    return cut, dataclasses.replace(factors, columns=columns, lora_b=lora_b, grad_b=grad_b)


def _fresh(grads: Sequence[Sequence[torch.Tensor | None]], width: int) -> Grads:
    return tuple(
        tuple(None if g is None else g.new_zeros(g.shape[0], width) for g in slot) for slot in grads
    )
