"""The multi-adapter linear: a frozen base GEMM and the adapters' branch in one autograd function.

What is computed and how is `LinearOps`'; here is what is saved, in which order the parts run, and
what tensor and sequence parallelism add. Only the local input and the rank-sized s are saved;
dropout is recomputed; gradients of the factors go straight into the jobs' fp32 slabs.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.frozen.frozen_parts import Vjp
from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.linear_ops import BoundLinear, LinearOps
from tlora_megatron.ops.routing.segments import MicroBatchView
from tlora_megatron.parallel.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
)
from tlora_megatron.parallel.nano.lanes import Lane


class TensorParallel(NamedTuple):
    """What a column-parallel linear does with its input and its input's gradient."""

    group: dist.ProcessGroup | None
    gather_input: bool
    """Sequence parallel: x is this rank's rows; gathered forward, dx reduce-scattered backward."""
    reduce_dgrad: bool
    """x is whole on every rank; dx is summed over the group backward."""
    lane: Lane | None = None
    """Has gathered x and will sum dx, of one nano-batch, in the linear's place."""

    def window(self, num_rows: int) -> tuple[int, int]:
        """Which of the micro-batch's rows x holds, `begin, end`."""
        if not self.gather_input:
            return 0, num_rows
        size = num_rows // dist.get_world_size(self.group)
        begin = dist.get_rank(self.group) * size
        return begin, begin + size


class AdapterBranch:
    """All adapters' branch at one site: `y += scaling * drop(x) A^T B^T`, slot by slot."""

    def __init__(self, bank: AdapterBank, site: Site) -> None:
        self.bank = bank
        self.site = site
        self.index = site.index

    @property
    def factors(self) -> SiteFactors | None:
        """The site's weights; None where no job has a target."""
        return self.bank.factors.get(self.index)

    @property
    def ops(self) -> LinearOps:
        """What computes the linear."""
        return self.bank.ops


class MultiLoRALinear(torch.autograd.Function):
    """`y = x W^T + b + branch(x)`, x and W sharded as in Megatron's Column- or RowParallelLinear.

    Column-parallel. Layout in: x `[T, 1, K]`, or `[T / tp, 1, K]` under sequence parallelism.
    Layout out: `[T, 1, N / tp]`. Forward: all-gather of x under sequence parallelism. Backward: one
    all-reduce of dx, or a reduce-scatter of it and a rank-sized all-reduce of dS; not the latter
    where the run has block-diagonal jobs, for which the gathered x is kept instead. Row-parallel: x
    `[T, 1, K / tp]`, out a partial sum `[T, 1, N]` that the caller's own reduction completes; no
    collective here. x must require grad (the embedding's output is made to), or autograd never
    comes by and the factors get no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        branch: AdapterBranch,
        view: MicroBatchView,
        tp: TensorParallel,
    ) -> torch.Tensor:
        x_TK = x.contiguous().view(-1, x.shape[-1])
        y_TN, saved, ctx.call = _forward(x_TK, weight_NK, bias_N, branch, view, tp)
        ctx.save_for_backward(*saved)
        ctx.x_shape = x.shape
        return y_TN.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Autograd expands a sum's gradient from one element.
        dy_TN = dy.contiguous().view(-1, dy.shape[-1])
        needs_dx = ctx.needs_input_grad[0]
        dx_TK = ctx.call.backward(dy_TN, *ctx.saved_tensors, needs_dx=needs_dx)
        dx = None if dx_TK is None else dx_TK.view(ctx.x_shape)
        return dx, None, None, None, None, None


def multi_lora_linear_vjp(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    branch: AdapterBranch,
    view: MicroBatchView,
    tp: TensorParallel,
) -> tuple[torch.Tensor, Vjp]:
    """As `MultiLoRALinear`, in two dimensions, and the way back as a function; without factors the
    base alone."""
    if branch.factors is None:
        return _frozen_linear_vjp(x_TK, weight_NK, bias_N, tp)
    y_TN, saved, call = _forward(x_TK, weight_NK, bias_N, branch, view, tp)
    return y_TN, lambda dy_TN: call.backward(dy_TN, *saved)


def _frozen_linear_vjp(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, tp: TensorParallel
) -> tuple[torch.Tensor, Vjp]:
    """As Megatron's linear with a frozen weight: saves nothing."""
    if tp.lane is not None:
        tp.lane.take_local()  # nobody needs it
    elif tp.gather_input:
        x_TK = all_gather_rows(x_TK, tp.group)
    y_TN = torch.matmul(x_TK, weight_NK.t())
    if bias_N is not None:
        y_TN = y_TN + bias_N

    def vjp(dy_TN: torch.Tensor) -> torch.Tensor:
        dx_TK = dy_TN.matmul(weight_NK)
        return dx_TK if tp.lane is not None else reduce_dgrad(dx_TK, tp).wait()

    return y_TN, vjp


def _forward(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    branch: AdapterBranch,
    view: MicroBatchView,
    tp: TensorParallel,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], _Call]:
    """y `[T, N]`, and what `_Call.backward` takes beside dy; x is contiguous."""
    factors = branch.factors
    assert factors is not None, f"site {branch.site.index} must have factors, got none"
    bound = branch.ops.bind(factors, view.rows)
    gathers = tp.gather_input and tp.lane is None
    full_TK = all_gather_rows(x_TK, tp.group) if gathers else x_TK
    y_TN, s = bound.forward(full_TK, weight_NK, bias_N)
    local = x_TK if tp.lane is None else tp.lane.take_local()
    exchanges = False
    if tp.gather_input and local is not None:
        # Adapters cut by rank have rows of A of their own here: their gradient takes all rows of x.
        exchanges = not branch.bank.is_cut_by_rank(branch.site)
    saved = local.flatten(0, -2) if exchanges and local is not None else full_TK
    return y_TN, (saved, s, weight_NK), _Call(bound, tp, exchanges)


class _Call(NamedTuple):
    """What the way back needs beside the saved tensors."""

    bound: BoundLinear
    tp: TensorParallel
    exchanges: bool
    """x was saved as it was before gathering: dS is summed over the ranks instead."""

    def backward(
        self,
        dy_TN: torch.Tensor,
        x_TK: torch.Tensor,
        s: torch.Tensor,
        weight_NK: torch.Tensor,
        *,
        needs_dx: bool = True,
    ) -> torch.Tensor | None:
        """dx `[T, K]`; gradients of factors are added where they belong."""
        bound, tp, exchanges = self
        ds = bound.backward_up(dy_TN, s)
        # This rank's rows need dS of the whole output. Summing dS over the group costs [T, R];
        # gathering x again would cost [T, K]. Either way dA is a partial sum, TP's once a step;
        # and so it is over all rows, of what the rank's own outputs give.
        num_rows = bound.rows.ends[-1]
        window = tp.window(num_rows) if exchanges else (0, num_rows)

        def add_factor_gradients(summed: torch.Tensor) -> None:
            bound.backward_down(x_TK, dy_TN, s, summed, window)

        if tp.lane is not None:
            dx_TK = bound.dgrad(dy_TN, ds, weight_NK)
            if exchanges:
                tp.lane.exchange(ds, add_factor_gradients)
            else:
                add_factor_gradients(ds)
            return dx_TK
        summed = all_reduce(ds.clone(), tp.group) if exchanges else Pending(ds, None)
        pending = None
        if needs_dx:
            pending = reduce_dgrad(bound.dgrad(dy_TN, ds, weight_NK), tp)
        add_factor_gradients(summed.wait())
        return None if pending is None else pending.wait()


def reduce_dgrad(dx_TK: torch.Tensor, tp: TensorParallel) -> Pending:
    """Starts the reduction of dx; gradients of factors are computed while it is under way."""
    if tp.gather_input:
        return reduce_scatter_rows(dx_TK, tp.group)
    return all_reduce(dx_TK, tp.group if tp.reduce_dgrad else None)
