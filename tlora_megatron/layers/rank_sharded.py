"""S-LoRA's sharding: both factors of every standard adapter cut over TP, nothing replicated.

                 lora_a            lora_b             forward             backward
    column       rank rows         as base's rows     s all-gathered      dS reduce-scattered
    row          as base's columns rows               s summed            dS summed

A row-parallel linear's `s B_k^T` is a slice of the output: it is added into that slice of the
base's partial sum, before the base's one reduction, which so gathers the slices. All collectives
here are of `[tokens, rank]`; every factor's gradient is complete where the factor is, and nothing
is summed over TP at the end of a step. For it the input of a column-parallel linear is kept whole
under sequence parallelism: this rank's rows of `lora_a` meet every token.

Block-diagonal adapters need none of this: they go through the fused linear, as ever.

Shapes: T rows, K features in, N features out. Source: S-LoRA (arXiv 2311.03285), section 6, whose
backward is ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.layers.linear import (
    AdapterBranch,
    TensorParallel,
    multi_lora_linear_vjp,
    reduce_dgrad,
)
from tlora_megatron.ops.frozen.frozen_parts import Vjp
from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.linear_ops import BoundLinear
from tlora_megatron.ops.lora.rank_places import RankPlaces
from tlora_megatron.ops.routing.row_groups import RowGroups
from tlora_megatron.ops.routing.segments import MicroBatchView
from tlora_megatron.parallel.collectives import (
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
)


class ShardedBranch(AdapterBranch):
    """All adapters' branch at one site under s_lora."""

    @property
    def own(self) -> SiteFactors | None:
        """Standard adapters' `lora_a` as it lies here: of a column-parallel linear part of its rank
        rows. `factors` holds their `lora_b`."""
        return self.bank.own_ranks.get(self.index, self.factors)

    @property
    def local(self) -> SiteFactors | None:
        """Both factors of block-diagonal adapters; None where there is no such job."""
        return self.bank.local.get(self.index)


class LocalBranch(AdapterBranch):
    """Block-diagonal adapters' branch alone, at a site where standard ones are shared."""

    @property
    def factors(self) -> SiteFactors | None:
        """Both factors; None where there is no such job."""
        return self.bank.local.get(self.index)


class _Exchange(NamedTuple):
    """What ranks exchange of s and dS at one site."""

    own: BoundLinear
    whole: BoundLinear
    group: dist.ProcessGroup | None
    tp_size: int
    is_column: bool

    def gather(self, own_s: torch.Tensor) -> torch.Tensor:
        """From what this rank's `lora_a` gives, s of all rank rows and all input features."""
        if not self.is_column:
            return self._sum(own_s)
        held = self.own.rank_places()
        if not held.num_values:
            return own_s
        gathered = all_gather_rows(held.take(own_s), self.group)
        return self._parts().put(gathered)

    def scatter(self, whole_ds: torch.Tensor) -> torch.Tensor:
        """From what this rank's `lora_b` gives, the whole dS of this rank's part of `lora_a`."""
        if not self.is_column:
            return self._sum(whole_ds)
        held = self.own.rank_places()
        if not held.num_values:
            return whole_ds
        return held.put(reduce_scatter_rows(self._parts().take(whole_ds), self.group).wait())

    def _parts(self) -> RankPlaces:
        return self.whole.rank_places(self.tp_size)

    def _sum(self, ranked: torch.Tensor) -> torch.Tensor:
        places = self.whole.rank_places()
        if not places.num_values:
            return ranked
        return places.put(all_reduce(places.take(ranked), self.group).wait())


class RankShardedLinear(torch.autograd.Function):
    """`y = x W^T + b + branch(x)` with both factors of standard adapters sharded.

    Layouts in and out, and the collectives of x and dx, are those of `MultiLoRALinear`; in addition
    those of the module's table. x must require grad. Saved: x, gathered where it is, and s.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        branch: ShardedBranch,
        rows: RowGroups,
        tp: TensorParallel,
    ) -> torch.Tensor:
        x_TK = x.contiguous().view(-1, x.shape[-1])
        y_TN, saved, ctx.call = _forward(x_TK, weight_NK, bias_N, branch, rows, tp)
        ctx.save_for_backward(*saved)
        ctx.x_shape = x.shape
        return y_TN.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy_TN = dy.contiguous().view(-1, dy.shape[-1])
        needs_dx = ctx.needs_input_grad[0]
        dx_TK = ctx.call.backward(dy_TN, *ctx.saved_tensors, needs_dx=needs_dx)
        dx = None if dx_TK is None else dx_TK.view(ctx.x_shape)
        return dx, None, None, None, None, None


_Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
"""x, s, that of block-diagonal adapters, W."""


def rank_sharded_linear_vjp(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    branch: ShardedBranch,
    view: MicroBatchView,
    tp: TensorParallel,
) -> tuple[torch.Tensor, Vjp]:
    """As `RankShardedLinear`, in two dimensions, and the way back as a function; without factors
    the base alone."""
    if branch.factors is None:
        return multi_lora_linear_vjp(x_TK, weight_NK, bias_N, branch, view, tp)
    y_TN, saved, call = _forward(x_TK, weight_NK, bias_N, branch, view.rows, tp)
    return y_TN, lambda dy_TN: call.backward(dy_TN, *saved)


def _forward(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    branch: ShardedBranch,
    rows: RowGroups,
    tp: TensorParallel,
) -> tuple[torch.Tensor, _Saved, _Call]:
    """y `[T, N]`, and what `_Call.backward` takes beside dy; x is contiguous."""
    exchange, local_factors = _exchange(branch, rows, tp), branch.local
    if tp.gather_input:
        x_TK = all_gather_rows(x_TK, tp.group)
    s = exchange.gather(exchange.own.down(x_TK))
    local = local_s = None
    if local_factors is None:
        y_TN = exchange.whole.linear(x_TK, weight_NK, bias_N, s)
    else:
        local = branch.ops.bind(local_factors, rows)
        base_TN, local_s = local.forward(x_TK, weight_NK, bias_N)
        y_TN = exchange.whole.up(s, base_TN, (0, len(x_TK)))
    return y_TN, (x_TK, s, local_s, weight_NK), _Call(exchange, local, tp)


class _Call(NamedTuple):
    """What the way back needs beside the saved tensors."""

    exchange: _Exchange
    local: BoundLinear | None
    tp: TensorParallel

    def backward(
        self,
        dy_TN: torch.Tensor,
        x_TK: torch.Tensor,
        s: torch.Tensor,
        local_s: torch.Tensor | None,
        weight_NK: torch.Tensor,
        *,
        needs_dx: bool = True,
    ) -> torch.Tensor | None:
        """dx `[T, K]`, of this rank's rows; gradients of factors are added where they belong."""
        exchange, local, tp = self
        own, whole = exchange.own, exchange.whole
        window = (0, own.rows.ends[-1])
        ds = exchange.scatter(whole.backward_up(dy_TN, s))
        local_ds = None
        if local is not None and local_s is not None:
            local_ds = local.backward_up(dy_TN, local_s)
        pending = None
        if needs_dx:
            if local is None or local_ds is None:
                dx_TK = own.dgrad(dy_TN, ds, weight_NK)
            else:
                dx_TK = local.dgrad(dy_TN, local_ds, weight_NK)
                dx_TK.add_(own.branch_dgrad(ds, window))
            pending = reduce_dgrad(dx_TK, tp)
        own.backward_down(x_TK, dy_TN, s, ds, window, None if whole is own else whole)
        if local is not None and local_s is not None and local_ds is not None:
            local.backward_down(x_TK, dy_TN, local_s, local_ds, window)
        return None if pending is None else pending.wait()


def _exchange(branch: ShardedBranch, rows: RowGroups, tp: TensorParallel) -> _Exchange:
    own_factors, factors = branch.own, branch.factors
    assert own_factors is not None, f"site {branch.site.index} must have factors, got none"
    assert factors is not None, f"site {branch.site.index} must have factors, got none"
    whole = branch.ops.bind(factors, rows)
    own = whole if own_factors is factors else branch.ops.bind(own_factors, rows)
    site = branch.site
    return _Exchange(own, whole, tp.group, site.tp_size, site.kind == "column")
