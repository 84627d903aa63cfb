"""The multi-adapter linear: a frozen base GEMM and the adapters' branch in one autograd function.

Only the local input and the rank-sized intermediate are saved; dropout is recomputed; gradients of
the factors go straight into the bank's fp32 accumulators.

Shapes: T rows, K features in, N features out, R = targets * padded rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tlora_megatron.layers.adapter_bank import AdapterBank, SiteStack
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.dropout import dropout, mix_ints
from tlora_megatron.ops.grouped import grouped_linear, grouped_outer
from tlora_megatron.ops.row_groups import RowGroups
from tlora_megatron.ops.segments import MicroBatchView
from tlora_megatron.parallel.collectives import all_gather_rows, all_reduce, reduce_scatter_rows


class TensorParallel(NamedTuple):
    """What a column-parallel linear does with its input and its input's gradient."""

    group: dist.ProcessGroup | None
    gather_input: bool
    """Sequence parallel: x is this rank's rows; gathered forward, dx reduce-scattered backward."""
    reduce_dgrad: bool
    """x is whole on every rank; dx is summed over the group backward."""


class AdapterBranch:
    """All adapters' branch at one site: `y += scaling * drop(x) A^T B^T`, group by group."""

    def __init__(self, bank: AdapterBank, site: Site) -> None:
        self.bank = bank
        self.site = site
        self._layer_key = mix_ints(site.index)

    @property
    def stack(self) -> SiteStack | None:
        """The site's weights; None where no job has a target."""
        return self.bank.stacks.get(self.site.index)

    def dropped(self, x_TK: torch.Tensor, rows: RowGroups) -> torch.Tensor:
        """`drop(x)`; its own backward when called on a gradient."""
        p_T = self.bank.row_dropout(rows)
        if p_T is None:
            return x_TK
        keys_T = rows.row_keys(x_TK.device)
        return dropout(x_TK, keys_T, p_T, self._layer_key, self.site.first_column)

    def down(self, x_TK: torch.Tensor, rows: RowGroups) -> torch.Tensor:
        """`scaling * drop(x) A^T`, `[T, R]` in the dtype of x."""
        stack = self._weights()
        s_TR = grouped_linear(self.dropped(x_TK, rows), stack.lora_a_SRK.transpose(1, 2), rows)
        return s_TR.mul_(self.bank.row_scaling(rows))

    def base_and_up(
        self,
        x_TK: torch.Tensor,
        s_TR: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        rows: RowGroups,
    ) -> torch.Tensor:
        """`x W^T + b + s B^T`, `[T, N]`."""
        stack = self._weights()
        if len(stack.targets) == 1 and stack.targets[0].columns.is_whole:
            # The base GEMM adds onto the branch's output: a pass over [T, N] less than the reverse.
            y_TN = grouped_linear(s_TR, stack.lora_b_SRN[0], rows).addmm_(x_TK, weight_NK.t())
            return y_TN if bias_N is None else y_TN.add_(bias_N)
        y_TN = F.linear(x_TK, weight_NK, bias_N)
        for p, shard in enumerate(stack.targets):
            part_TR = s_TR[:, p * stack.rank : (p + 1) * stack.rank]
            shard.columns.add(y_TN, grouped_linear(part_TR, stack.lora_b_SRN[p], rows))
        return y_TN

    def backward_up(self, dy_TN: torch.Tensor, s_TR: torch.Tensor, rows: RowGroups) -> torch.Tensor:
        """Accumulates dB and returns the gradient of `drop(x) A^T`, `[T, R]`."""
        stack = self._weights()
        ds_TR = torch.empty_like(s_TR)
        for p, shard in enumerate(stack.targets):
            columns = slice(p * stack.rank, (p + 1) * stack.rank)
            dy_part_TN = shard.columns.read(dy_TN)
            ds_TR[:, columns] = grouped_linear(
                dy_part_TN, stack.lora_b_SRN[p].transpose(1, 2), rows
            )
            _accumulate(
                stack.grad_b_SRN[p], grouped_outer(s_TR[:, columns], dy_part_TN, rows), rows
            )
        return ds_TR.mul_(self.bank.row_scaling(rows))

    def dgrad(
        self, dy_TN: torch.Tensor, ds_TR: torch.Tensor, weight_NK: torch.Tensor, rows: RowGroups
    ) -> torch.Tensor:
        """Gradient of x through base and branch, `[T, K]`."""
        dx_TK = self.dropped(grouped_linear(ds_TR, self._weights().lora_a_SRK, rows), rows)
        return dx_TK.addmm_(dy_TN, weight_NK)

    def backward_down(self, x_TK: torch.Tensor, ds_TR: torch.Tensor, rows: RowGroups) -> None:
        """Accumulates dA."""
        grads = grouped_outer(ds_TR, self.dropped(x_TK, rows), rows)
        _accumulate(self._weights().grad_a_SRK, grads, rows)

    def _weights(self) -> SiteStack:
        stack = self.stack
        assert stack is not None, f"site {self.site.layer}.{self.site.linear} carries no adapter"
        return stack


def _accumulate(total_SMN: torch.Tensor, grads_SMN: torch.Tensor, rows: RowGroups) -> None:
    """Adds gradients to their slots, fp32; absent slots hold nothing and get nothing."""
    if len(rows.present_slots) == rows.num_slots:
        total_SMN[:-1].add_(grads_SMN[:-1])
        return
    present = rows.present_index(total_SMN.device)
    total_SMN.index_add_(0, present, grads_SMN.index_select(0, present).to(total_SMN.dtype))


class MultiLoRALinear(torch.autograd.Function):
    """`y = x W^T + b + branch(x)`, x and W sharded as in Megatron's Column- or RowParallelLinear.

    Column-parallel. Layout in: x `[T, 1, K]`, or `[T / tp, 1, K]` under sequence parallelism.
    Layout out: `[T, 1, N / tp]`. Forward: all-gather of x under sequence parallelism. Backward: one
    all-reduce of dx, or one reduce-scatter and a rank-sized one of dS. Row-parallel: x `[T, 1, K /
    tp]`, out a partial sum `[T, 1, N]` that the caller's own reduction completes; no collective
    here. x must require grad (the embedding's output is made to), or autograd never comes by and
    the factors get no gradient.
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
        x_TK = x.flatten(0, -2)
        full_TK = all_gather_rows(x_TK, tp.group) if tp.gather_input else x_TK
        s_TR = branch.down(full_TK, view.rows)
        y_TN = branch.base_and_up(full_TK, s_TR, weight_NK, bias_N, view.rows)
        ctx.save_for_backward(x, s_TR, weight_NK)
        ctx.branch, ctx.view, ctx.tp = branch, view, tp
        return y_TN.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, s_TR, weight_NK = ctx.saved_tensors
        branch, tp, rows = ctx.branch, ctx.tp, ctx.view.rows
        dy_TN = dy.flatten(0, -2)
        ds_TR = branch.backward_up(dy_TN, s_TR, rows)
        x_rows, ds_rows = rows, ds_TR
        if tp.gather_input:
            # Summing dS over the group and keeping this rank's rows costs [T, R]; gathering x again
            # would cost [T, K]. Either way dA is a partial sum that TP adds once a step.
            ds_rows = reduce_scatter_rows(ds_TR, tp.group).wait()
            x_rows = ctx.view.shard(dist.get_rank(tp.group), dist.get_world_size(tp.group))
        pending = None
        if ctx.needs_input_grad[0]:
            pending = _reduce(branch.dgrad(dy_TN, ds_TR, weight_NK, rows), tp)
        branch.backward_down(x.flatten(0, -2), ds_rows, x_rows)
        dx = None if pending is None else pending.wait().view(x.shape)
        return dx, None, None, None, None, None


def _reduce(dx_TK: torch.Tensor, tp: TensorParallel) -> Any:
    """Starts the reduction of dx; dA is computed while it is under way."""
    if tp.gather_input:
        return reduce_scatter_rows(dx_TK, tp.group)
    return all_reduce(dx_TK, tp.group if tp.reduce_dgrad else None)
