"""Adapters around a base linear whose GEMM and collective are not ours: Transformer Engine's.

The base is called as it is (its FP8, its overlapped collectives) and the branch is added to its
output. What ranks exchange is rank-sized, s forward and dS backward:

                 forward                              backward
    column       s whole on every rank                dS summed, for dx
    column, SP   s of own rows, then gathered         dS summed, for dx and dA
    row          s summed                             nothing
    row, SP      s summed, used in own rows           dS of own rows, then gathered

Gradients of factors are what `training.optimizer` expects: complete for the sharded factor, a
partial sum over TP for the replicated one. Gathering is summing: s and dS of rows that a rank does
not hold are zero there. Layout of s and dS is the implementation's own (`ops.lora.linear_ops`), so
a rank that holds a part of the rows fills the others with zeros and computes all; the base, by far
the larger part, is cut as ever.

Shapes: T rows of the micro-batch, W of them on this rank, K features in, N features out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tlora_megatron.layers.linear import AdapterBranch
from tlora_megatron.ops.frozen.frozen_parts import Vjp
from tlora_megatron.ops.lora.linear_ops import BoundLinear
from tlora_megatron.ops.routing.segments import MicroBatchView
from tlora_megatron.parallel.collectives import Pending, all_reduce


class Exchange(NamedTuple):
    """How a base linear is parallel."""

    group: dist.ProcessGroup | None
    is_column: bool
    sequence_parallel: bool
    """Column: x is this rank's rows. Row: y is."""

    def window(self, num_rows: int, *, of_input: bool) -> tuple[int, int]:
        """The rows, `begin, end`, of x or of y that this rank holds."""
        if not self.sequence_parallel or of_input != self.is_column:
            return 0, num_rows
        size = num_rows // dist.get_world_size(self.group)
        begin = dist.get_rank(self.group) * size
        return begin, begin + size


class InputNorm(NamedTuple):
    """The norm that a base linear begins with; frozen, as the base."""

    weight_K: torch.Tensor
    bias_K: torch.Tensor | None
    eps: float
    is_rms: bool
    zero_centered: bool
    """The weight is held less 1."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises `[..., K]` in fp32, which is then rounded once."""
        weight_K, bias_K, wide = self.weight_K, self.bias_K, x
        if self.zero_centered or weight_K.dtype != x.dtype:
            # torch's norms of one dtype are fp32 inside, in a pass; 1 + weight would be rounded.
            weight_K = weight_K.float() + self.zero_centered
            bias_K = None if bias_K is None else bias_K.float()
            wide = x.float()
        if self.is_rms:
            return F.rms_norm(wide, weight_K.shape, weight_K, self.eps).to(x.dtype)
        return F.layer_norm(wide, weight_K.shape, weight_K, bias_K, self.eps).to(x.dtype)


class BlackBoxBranch(torch.autograd.Function):
    """`base_y + branch(norm(x))`, in the layouts and with the collectives of the module's table.

    Layout in: what the base got, x `[W, 1, K]`, and what it returned, `[W, 1, N]`; out: the latter.
    x must require grad, or autograd never comes by. Saved: x and the rank-sized s; the norm is
    computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        base_y: torch.Tensor,
        branch: AdapterBranch,
        view: MicroBatchView,
        exchange: Exchange,
        norm: InputNorm | None,
    ) -> torch.Tensor:
        y, saved, ctx.call = _forward(x, base_y, branch, view, exchange, norm)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_dx = ctx.needs_input_grad[0]
        dx = ctx.call.backward(dy, *ctx.saved_tensors, needs_dx=needs_dx)
        return dx, dy, None, None, None, None


def black_box_vjp(
    x_WK: torch.Tensor,
    base_WN: torch.Tensor,
    base_vjp: Vjp,
    branch: AdapterBranch,
    view: MicroBatchView,
    exchange: Exchange,
) -> tuple[torch.Tensor, Vjp]:
    """A base's output with the branch added, in two dimensions, and the way back through both;
    without factors the base alone."""
    if branch.factors is None:
        return base_WN, base_vjp
    y_WN, saved, call = _forward(x_WK, base_WN, branch, view, exchange, None)

    def vjp(dy_WN: torch.Tensor) -> torch.Tensor:
        dx_WK = call.backward(dy_WN, *saved)
        assert dx_WK is not None, "the way back must give the input's gradient"
        return dx_WK.add_(base_vjp(dy_WN))

    return y_WN, vjp


def _forward(
    x: torch.Tensor,
    base_y: torch.Tensor,
    branch: AdapterBranch,
    view: MicroBatchView,
    exchange: Exchange,
    norm: InputNorm | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], _Call]:
    """y in the shape of the base's, and what `_Call.backward` takes beside dy."""
    factors, rows = branch.factors, view.rows
    assert factors is not None, f"site {branch.site.index} must have factors, got none"
    bound = branch.ops.bind(factors, rows)
    num_rows = rows.ends[-1]
    window = exchange.window(num_rows, of_input=True)
    inputs_WK = (x if norm is None else norm(x)).flatten(0, -2).to(factors.lora_a.dtype)
    own = s = bound.down(_spread(inputs_WK, window, num_rows))
    # dB of a row-parallel linear is to be a partial sum: of own features, or of own rows.
    partial_features = not exchange.is_column and not exchange.sequence_parallel
    if not exchange.is_column or exchange.sequence_parallel:
        s = _sum(own.clone() if partial_features else own, exchange).wait()
    base_WN, window = base_y.flatten(0, -2), exchange.window(num_rows, of_input=False)
    y_WN = bound.up(s, base_WN, window)
    call = _Call(bound, exchange, norm)
    return y_WN.view(base_y.shape), (x, own if partial_features else s), call


class _Call(NamedTuple):
    """What the way back needs beside the saved tensors."""

    bound: BoundLinear
    exchange: Exchange
    norm: InputNorm | None

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, *, needs_dx: bool = True
    ) -> torch.Tensor | None:
        """The branch's part of dx; gradients of factors are added where they belong."""
        bound, exchange, norm = self
        num_rows = bound.rows.ends[-1]
        dy_WN = dy.flatten(0, -2).to(s.dtype)
        dy_TN = _spread(dy_WN, exchange.window(num_rows, of_input=False), num_rows)
        ds = bound.backward_up(dy_TN, s)
        summed = Pending(ds, None)
        if exchange.is_column or exchange.sequence_parallel:
            # Column without SP: dA is a partial sum over TP, of what each rank's columns give.
            keep = exchange.is_column and not exchange.sequence_parallel
            summed = _sum(ds.clone() if keep else ds, exchange)
            ds = ds if keep else summed.wait()
        window = exchange.window(num_rows, of_input=True)
        leaf = inputs = x
        if norm is not None:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                inputs = norm(leaf)
        inputs_WK = inputs.detach().flatten(0, -2).to(s.dtype).contiguous()
        bound.backward_down(inputs_WK, dy_TN, s, ds, window)
        if not needs_dx:
            return None
        dx = bound.branch_dgrad(summed.wait(), window).to(x.dtype).view(x.shape)
        return dx if norm is None else torch.autograd.grad(inputs, leaf, dx)[0]


def _spread(x_WK: torch.Tensor, window: tuple[int, int], num_rows: int) -> torch.Tensor:
    """The rows in their place among all of the micro-batch's, zeros elsewhere."""
    begin, end = window
    assert len(x_WK) == end - begin, f"rows must be {end - begin} on this rank, got {len(x_WK)}"
    if end - begin == num_rows:
        return x_WK.contiguous()
    x_TK = x_WK.new_zeros(num_rows, x_WK.shape[1])
    x_TK[begin:end] = x_WK
    return x_TK


def _sum(ranked: torch.Tensor, exchange: Exchange) -> Pending:
    """Starts summing s or dS over the group, in place."""
    return all_reduce(ranked, exchange.group) if ranked.numel() else Pending(ranked, None)
