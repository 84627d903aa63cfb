"""Adapters around a base linear whose GEMM and collective are not ours (Transformer Engine's).

The base is called as it is (its FP8, its overlapped collectives) and the branch is added to its
output. Ranks exchange only rank-sized tensors, s forward and dS backward:

                 forward                              backward
    column       s whole on every rank                dS summed, for dx
    column, SP   s of own rows, then gathered         dS summed, for dx and dA
    row          s summed                             nothing
    row, SP      s summed, used in own rows           dS of own rows, then gathered

Gradients are complete for the sharded factor, a partial sum over TP for the replicated one.
Gathering is summing: s and dS of rows that a rank does not hold are zero there.

Shapes: T rows of the micro-batch, W of them on this rank, K features in, N features out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import Computed, LinearLayout, with_vjp
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.frozen.parts import NormWeight, Vjp
from tlora_megatron.ops.frozen.rms_norm import rms_norm_once_reference
from tlora_megatron.ops.lora.linear_ops import BoundLinear, SiteFactors
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.collectives import Pending, all_reduce


class InputNorm(NamedTuple):
    """The frozen norm that a base linear begins with."""

    weight_K: Tensor
    bias_K: Tensor | None
    eps: float
    is_rms: bool
    zero_centered: bool
    """The weight is held less 1."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises `[..., K]` in fp32, which is then rounded once."""
        weight_K, bias_K, wide = self.weight_K, self.bias_K, x
        if self.is_rms:
            return rms_norm_once_reference(x, NormWeight(weight_K, self.eps, self.zero_centered))
        if self.zero_centered or weight_K.dtype != x.dtype:
            # torch's norms of one dtype are fp32 inside, in a pass; 1 + weight would be rounded.
            weight_K = weight_K.float() + self.zero_centered
            bias_K = None if bias_K is None else bias_K.float()
            wide = x.float()
        return F.layer_norm(wide, weight_K.shape, weight_K, bias_K, self.eps).to(x.dtype)


class BlackBoxStrategy:
    """Adds the branch to a base's output, with the collectives of the module's table.

    Saved: x and the rank-sized s; the norm is computed again.
    """

    def __init__(self, bank: AdapterBank, site: Site, layout: LinearLayout) -> None:
        self.layout = layout
        self._ops = bank.ops
        self._index = site.index
        self._factors = bank.fused_factors
        is_column, sequence_parallel = layout.kind == "column", layout.sequence_parallel
        self._sums_s = not is_column or sequence_parallel
        # dB of a row-parallel linear is to be a partial sum: of own features, or of own rows.
        self._keeps_own_s = not is_column and not sequence_parallel

    @property
    def factors(self) -> SiteFactors | None:
        """The adapters' weights here; None where no job has a target."""
        return self._factors.get(self._index)

    def forward(
        self, x_WK: Tensor, base_WN: Tensor, view: MicroBatchView, norm: InputNorm | None = None
    ) -> Computed:
        """Returns `base_y + branch(norm(x))`, `[W, N]`; there must be factors."""
        factors, num_rows, layout = self.factors, view.rows.ends[-1], self.layout
        assert factors is not None, f"site {self._index} must have factors, got none"
        bound = self._ops.bind(factors, view.rows)
        inputs_WK = (x_WK if norm is None else norm(x_WK)).to(factors.lora_a.dtype)
        own = s = bound.down(_spread(inputs_WK, layout.input_window(num_rows), num_rows))
        if self._sums_s:
            s = _sum(own.clone() if self._keeps_own_s else own, layout).wait()
        y_WN = bound.up(s, base_WN, layout.output_window(num_rows))
        saved = (x_WK, own if self._keeps_own_s else s)
        return Computed(y_WN, saved, BlackBoxBackward(bound, layout, norm).run)


class BlackBoxBackward(NamedTuple):
    """The backward pass of `BlackBoxStrategy`."""

    bound: BoundLinear
    layout: LinearLayout
    norm: InputNorm | None

    def run(
        self, dy_WN: Tensor, x_WK: Tensor, s: Tensor, *, needs_dx: bool = True
    ) -> Tensor | None:
        """Returns the branch's part of dx `[W, K]`, and adds factors' gradients."""
        bound, layout, norm = self
        num_rows, is_column = bound.rows.ends[-1], layout.kind == "column"
        dy_TN = _spread(dy_WN.to(s.dtype), layout.output_window(num_rows), num_rows)
        ds = bound.backward_up(dy_TN, s)
        summed = Pending(ds, None)
        if is_column or layout.sequence_parallel:
            # Column without SP: dA is a partial sum over TP, of what each rank's columns give.
            keep = is_column and not layout.sequence_parallel
            summed = _sum(ds.clone() if keep else ds, layout)
            ds = ds if keep else summed.wait()
        window = layout.input_window(num_rows)
        leaf = inputs = x_WK
        if norm is not None:
            with torch.enable_grad():
                leaf = x_WK.detach().requires_grad_()
                inputs = norm(leaf)
        inputs_WK = inputs.detach().to(s.dtype).contiguous()
        bound.backward_down(inputs_WK, dy_TN, s, ds, window)
        if not needs_dx:
            return None
        dx_WK = bound.branch_dgrad(summed.wait(), window).to(x_WK.dtype)
        return dx_WK if norm is None else torch.autograd.grad(inputs, leaf, dx_WK)[0]


def black_box_vjp(
    x_WK: Tensor, base: tuple[Tensor, Vjp], strategy: BlackBoxStrategy, view: MicroBatchView
) -> tuple[Tensor, Vjp]:
    """Returns a base's output with the branch added, and the way back through both; without factors
    it is the base alone."""
    if strategy.factors is None:
        return base
    base_WN, base_back = base
    y_WN, branch_back = with_vjp(strategy.forward(x_WK, base_WN, view))
    return y_WN, lambda dy_WN: branch_back(dy_WN).add_(base_back(dy_WN))


def _spread(x_WK: Tensor, window: tuple[int, int], num_rows: int) -> Tensor:
    """Returns the rows in their place among all of the micro-batch's, zeros elsewhere."""
    begin, end = window
    assert len(x_WK) == end - begin, f"rows must be {end - begin} on this rank, got {len(x_WK)}"
    if end - begin == num_rows:
        return x_WK.contiguous()
    x_TK = x_WK.new_zeros(num_rows, x_WK.shape[1])
    x_TK[begin:end] = x_WK
    return x_TK


def _sum(ranked: Tensor, layout: LinearLayout) -> Pending:
    """Starts summing s or dS over the group, in place."""
    return all_reduce(ranked, layout.group) if ranked.numel() else Pending(ranked, None)
