"""Adapters whose outer factor all experts share, around experts that somebody else built.

Rows go to their experts with rank columns behind their features, and results come back with some:
the dispatcher carries both at once, and its sums over a row's experts, and over the ranks that cut
an expert, are those that the columns want. The shared factor multiplies this rank's rows, before
they go and after they have come back. Between there and here each of the experts' linears adds its
own factor's part. What is computed is `ops.experts.outer`.

Layout: this rank's rows, so under sequence parallelism a part of the micro-batch's; gradients of
shared factors are sums over these. Collectives are the dispatcher's, with C columns more a row.

Shapes: T rows here, Q rows at this rank's experts, H hidden features, K and N features of an
expert's linear, C rank columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns
from tlora_megatron.ops.experts.factors import OuterFactors, OuterSide
from tlora_megatron.ops.experts.outer import add_gradients, expand, scale, shrink


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankColumns:
    """The columns that travel behind the features of one call's rows."""

    first: OuterFactors | None
    """Of the adapters on gate and up; None = no adapter shares some."""
    second: OuterFactors | None
    """Of those on down."""
    tokens: ExpertRuns
    """The adapters' rows on this rank."""

    @property
    def width(self) -> int:
        """Number of columns, the same each way and on every rank."""
        return max(factors.width for factors in (self.first, self.second) if factors is not None)

    def widen(self, x: Tensor) -> Tensor:
        """Puts what gate's and up's shared A make of `[..., H]` behind it, `[..., H + C]`."""
        wide: Tensor = _Widen.apply(x.flatten(0, -2), self)
        return wide.unflatten(0, x.shape[:-1])

    def split(self, wide_Q: Tensor) -> tuple[Tensor, Tensor]:
        """Takes arrived rows apart into features `[Q, H]` and columns `[Q, C]`."""
        sizes = [wide_Q.shape[1] - self.width, self.width]
        x_QH, u_QC = wide_Q.split(sizes, dim=1)
        return x_QH.contiguous(), u_QC.contiguous()

    def add_to_first(
        self, u_QC: Tensor, y_QN: Tensor, runs: ExpertRuns, expert: int | None
    ) -> Tensor:
        """Adds to the first linear's output, in its memory.

        Args:
            runs: of the rows.
            expert: the only one whose rows they are; None = all of the rank.
        """
        if self.first is None:
            return y_QN
        out: Tensor = _AddToFirst.apply(u_QC, y_QN, runs, _own(self.first, expert))
        return out

    def widen_result(
        self, h_QK: Tensor, y_QH: Tensor, runs: ExpertRuns, expert: int | None
    ) -> Tensor:
        """Puts what down's own A's make of its input behind its output, `[Q, H + C]`."""
        side = None if self.second is None else _own(self.second, expert)
        wide: Tensor = _WidenResult.apply(h_QK, y_QH, runs, side, self.width)
        return wide

    def narrow(self, wide: Tensor) -> Tensor:
        """Takes what came back, `[..., H + C]`, to `[..., H]`, with down's shared B's part."""
        out: Tensor = _Narrow.apply(wide.flatten(0, -2), self)
        return out.unflatten(0, wide.shape[:-1])


def _own(factors: OuterFactors, expert: int | None) -> OuterSide:
    if expert is None:
        return factors.own
    one = slice(expert, expert + 1)
    targets = (
        tuple(t._replace(weight=t.weight[one], grad=t.grad[one]) for t in held)
        for held in factors.own.targets
    )
    return OuterSide(tuple(targets))


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, columns: RankColumns) -> Tensor:
        ctx.save_for_backward(x_TH)
        ctx.columns, first = columns, columns.first
        if first is None:
            return torch.cat([x_TH, x_TH.new_zeros(len(x_TH), columns.width)], 1)
        u_TC = shrink(x_TH, columns.tokens, first.shared, columns.width)
        return torch.cat([x_TH, scale(u_TC, columns.tokens, first)], 1)

    @staticmethod
    def backward(ctx: Any, dwide_T: Tensor) -> tuple[Tensor, None]:
        (x_TH,) = ctx.saved_tensors
        columns, first = ctx.columns, ctx.columns.first
        dx_TH, du_TC = _parts(dwide_T, columns.width)
        if first is not None:
            du_TC = scale(du_TC, columns.tokens, first)
            add_gradients(du_TC, x_TH, columns.tokens, first.shared)
            expand(du_TC, dx_TH, columns.tokens, first.shared)
        return dx_TH, None


class _AddToFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u_QC: Tensor, y_QN: Tensor, runs: ExpertRuns, own: OuterSide) -> Tensor:
        expand(u_QC, y_QN, runs, own)
        ctx.save_for_backward(u_QC)
        ctx.runs, ctx.own = runs, own
        return y_QN.view(y_QN.shape)

    @staticmethod
    def backward(ctx: Any, dy_QN: Tensor) -> tuple[Tensor | None, ...]:
        (u_QC,) = ctx.saved_tensors
        dy_QN = dy_QN.contiguous()
        add_gradients(u_QC, dy_QN, ctx.runs, ctx.own)
        return shrink(dy_QN, ctx.runs, ctx.own, u_QC.shape[1]), dy_QN, None, None


class _WidenResult(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_QK: Tensor, y_QH: Tensor, runs: ExpertRuns, own: OuterSide | None, width: int
    ) -> Tensor:
        ctx.runs, ctx.own, ctx.width = runs, own, width
        if own is None:
            return torch.cat([y_QH, y_QH.new_zeros(len(y_QH), width)], 1)
        ctx.save_for_backward(h_QK)
        return torch.cat([y_QH, shrink(h_QK.contiguous(), runs, own, width)], 1)

    @staticmethod
    def backward(ctx: Any, dwide_Q: Tensor) -> tuple[Tensor | None, ...]:
        dy_QH, ds_QC = _parts(dwide_Q, ctx.width)
        if ctx.own is None:
            return None, dy_QH, None, None, None
        (h_QK,) = ctx.saved_tensors
        h_QK = h_QK.contiguous()
        add_gradients(ds_QC, h_QK, ctx.runs, ctx.own)
        dh_QK = torch.zeros_like(h_QK)
        expand(ds_QC, dh_QK, ctx.runs, ctx.own)
        return dh_QK, dy_QH, None, None, None


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide_T: Tensor, columns: RankColumns) -> Tensor:
        y_TH, s_TC = _parts(wide_T, columns.width)
        ctx.columns, second = columns, columns.second
        if second is not None:
            s_TC = scale(s_TC, columns.tokens, second)
            expand(s_TC, y_TH, columns.tokens, second.shared)
            ctx.save_for_backward(s_TC)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, None]:
        columns, second = ctx.columns, ctx.columns.second
        if second is None:
            return torch.cat([dy_TH, dy_TH.new_zeros(len(dy_TH), columns.width)], 1), None
        (s_TC,) = ctx.saved_tensors
        dy_TH = dy_TH.contiguous()
        add_gradients(s_TC, dy_TH, columns.tokens, second.shared)
        ds_TC = shrink(dy_TH, columns.tokens, second.shared, columns.width)
        return torch.cat([dy_TH, scale(ds_TC, columns.tokens, second)], 1), None


def _parts(wide: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Takes features and columns apart, in memory of their own: both are added to."""
    parts = wide.split([wide.shape[1] - width, width], dim=1)
    features, columns = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return features, columns
