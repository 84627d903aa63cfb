"""The rows of one call of a layer's routed experts, and adapters that share a factor over experts.

Where adapters share a factor, rows go to their experts with rank columns behind their features, and
results come back with some: the dispatcher's sums are those that the columns want. The shared
factor multiplies this rank's rows, before they go and after they have come back; between there and
here each of the experts' linears adds its own factor's part (`ops.experts.choice`).

Layout: this rank's rows, so under sequence parallelism a part of the micro-batch's; gradients of
shared factors are sums over these. Collectives are the dispatcher's, with C columns more a row.

Megatron's dispatchers lay rows out expert by expert, those of an expert source rank by source rank,
and those of a source adapter by adapter. With several sources one all-gather of their numbers tells
a rank what arrives, and its rows are put adapter by adapter before the experts and back behind
them. The host waits for none of this. An `ExpertCall` is a value of one call, in recompute too.

Shapes: T rows here, Q rows at this rank's experts, H hidden features, K and N features of an
expert's linear, C rank columns, E experts of the layer, P sources, L = E / EP experts of this rank,
S adapters and the null slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.ops.experts.branch import (
    ExpertFactors,
    ExpertRuns,
    OuterFactors,
    OuterSide,
    PlacedRows,
)
from tlora_megatron.ops.experts.choice import add_gradients, expand, scale, shrink
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.collectives import gather_rows


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
        return _Widen.apply(x.flatten(0, -2), self).unflatten(0, x.shape[:-1])

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
            expert: the only one whose rows they are; None = all of the rank.
        """
        if self.first is None:
            return y_QN
        return _AddToFirst.apply(u_QC, y_QN, runs, _own(self.first, expert))

    def widen_result(
        self, h_QK: Tensor, y_QH: Tensor, runs: ExpertRuns, expert: int | None
    ) -> Tensor:
        """Puts what down's own A's make of its input behind its output, `[Q, H + C]`."""
        side = None if self.second is None else _own(self.second, expert)
        return _WidenResult.apply(h_QK, y_QH, runs, side, self.width)

    def narrow(self, wide: Tensor) -> Tensor:
        """Takes what came back, `[..., H + C]`, to `[..., H]`, with down's shared B's part."""
        return _Narrow.apply(wide.flatten(0, -2), self).unflatten(0, wide.shape[:-1])


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The ranks whose rows meet the experts of this one, as a dispatcher has them."""

    group: dist.ProcessGroup
    """All ranks that share the experts of a layer, those that cut one expert side by side."""
    expert_tp: int
    """Ranks that cut each expert."""
    is_by_part: bool
    """Rows of an expert lie by the source's part of an expert first (alltoall), else by rank."""
    experts: range
    """The experts of this rank."""

    @property
    def count(self) -> int:
        """Number of sources, this rank included."""
        return dist.get_world_size(self.group)

    def in_row_order(self, counts_PLS: Tensor) -> Tensor:
        """Takes what lies by rank in the group to the order of the rows inside an expert."""
        if not self.is_by_part:
            return counts_PLS
        parts = counts_PLS.unflatten(0, (-1, self.expert_tp))
        return parts.transpose(0, 1).flatten(0, 1)


class SentRows(NamedTuple):
    """The rows that a layer routes, on a rank that has all of its experts."""

    x_TH: Tensor
    """The layer's input, which its router keeps as well."""
    routing_map_TE: Tensor
    """bool."""

    def placed(self, num_rows: int) -> PlacedRows:
        """Returns a row for each of its experts, as `ExpertRuns` have them.

        Args:
            num_rows: Q, which the host knows.
        """
        is_sent_ET = self.routing_map_TE.t().flatten().to(torch.int8)
        sent_Q = is_sent_ET.argsort(descending=True, stable=True)[:num_rows]
        return PlacedRows(self.x_TH.contiguous(), sent_Q % len(self.x_TH))


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertCall:
    """The rows of one call, and the adapters at the two linears of its experts."""

    runs: ExpertRuns
    """The rows as the experts compute them: by expert, and in each by adapter."""
    factors: Mapping[str, ExpertFactors | None]
    """Those that every expert has for itself, by the name that sites give the linear; None = no job
    has some."""
    columns: RankColumns | None = None
    """What travels with the rows for jobs whose experts share the outer factors; None = nothing."""
    arriving_PLS: Tensor | None = None
    """int64: the rows in the order in which they arrive, of each source; None = of one alone."""
    sent: SentRows | None = None
    """Where the rows come from; None = from other ranks as well."""

    def order(self, num_rows: int) -> Tensor | None:
        """Returns the index `[Q]` that puts arriving rows adapter by adapter; None if they are."""
        if self.arriving_PLS is None:
            return None
        counts_LPS = self.arriving_PLS.transpose(0, 1)
        experts, _, columns = counts_LPS.shape
        pairs_LS = torch.arange(experts * columns, device=counts_LPS.device).view(-1, 1, columns)
        pairs_LPS = pairs_LS.expand_as(counts_LPS).flatten()
        arrived_Q = pairs_LPS.repeat_interleave(counts_LPS.flatten(), output_size=num_rows)
        return arrived_Q.argsort(stable=True)

    @cached_property
    def of_experts(self) -> tuple[ExpertRuns, ...]:
        """The runs of each expert alone, on the host, which waits for the device once."""
        return tuple(ExpertRuns(counts_S[None]) for counts_S in self.runs.counts_LS.cpu())


def begin_call(
    sent: SentRows,
    view: MicroBatchView,
    sources: Sources,
    window: slice,
    factors: Mapping[str, ExpertFactors | None],
    columns: RankColumns | None,
) -> ExpertCall:
    """Returns the rows that a layer's routing sends to this rank's experts.

    Collective over the sources, without a wait of the host.
    """
    counts_ES = count_rows(sent.routing_map_TE, view, window)
    own = slice(sources.experts.start, sources.experts.stop)
    if sources.count == 1:
        runs = ExpertRuns(counts_ES[own])
        return ExpertCall(runs=runs, factors=factors, columns=columns, sent=sent)
    gathered = gather_rows(counts_ES.to(torch.int32)[None], sources.group).wait()
    arriving_PLS = sources.in_row_order(gathered[:, own].long())
    runs = ExpertRuns(arriving_PLS.sum(0))
    return ExpertCall(runs=runs, factors=factors, columns=columns, arriving_PLS=arriving_PLS)


def count_rows(routing_map_TE: Tensor, view: MicroBatchView, window: slice) -> Tensor:
    """Returns int64 `[E, S]`: this rank's rows of each adapter at each expert, null slot last."""
    device, begin, end = routing_map_TE.device, window.start, window.stop

    def build() -> Tensor:
        ends = [min(max(last, begin), end) - begin for last in (0, *view.rows.ends)]
        return to_device(torch.tensor(ends), device)

    ends = view.cached(f"expert_ends@{device}@{begin}-{end}", build)
    before_TE = F.pad(routing_map_TE.long().cumsum(0), (0, 0, 1, 0))
    return before_TE[ends].diff(dim=0).t()


_current: ExpertCall | None = None
"""A plain global, not a context variable: autograd recomputes on threads of its own."""


def bind_call(call: ExpertCall | None) -> None:
    """Makes a call the one whose experts run next; None = they have no adapters."""
    global _current
    _current = call


def take_call() -> ExpertCall | None:
    """Returns the bound call, which no other experts then get."""
    call = _current
    bind_call(None)
    return call


def current_call() -> ExpertCall | None:
    """Returns the call whose experts run; None outside, or without adapters."""
    return _current
