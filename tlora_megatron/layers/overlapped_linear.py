"""A multi-adapter linear whose communication its own nano-batches hide.

For layers that nano-batches cannot go through in turns (`parallel.nano.lanes`). Each nano-batch's
product is computed on its own, on the main stream; what it sends or receives runs on its side
stream beside the next one's product.

Shapes: T rows of the micro-batch, K features in, N features out, n tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlora_megatron.layers.linear import AdapterBranch
from tlora_megatron.ops.routing.segments import MicroBatchView
from tlora_megatron.parallel.nano.overlap import Overlap
from tlora_megatron.parallel.nano.side_stream import SideStream


class Traffic(NamedTuple):
    """What a linear sends and receives, by nano-batch."""

    overlap: Overlap
    is_column: bool
    sequence_parallel: bool
    num_ranks: int

    @property
    def gathers_input(self) -> bool:
        """x is this rank's rows of each nano-batch."""
        return self.is_column and self.sequence_parallel

    @property
    def reduces_output(self) -> bool:
        """y is a partial sum."""
        return not self.is_column

    def local_rows(self, view: MicroBatchView) -> list[int]:
        """Rows of each nano-batch that a rank holds outside of the linear pair."""
        size = self.num_ranks if self.sequence_parallel else 1
        return [nano.num_tokens // size for nano in view.nano_views]

    def streams(self, view: MicroBatchView) -> list[SideStream]:
        """One a nano-batch."""
        streams = self.overlap.streams(len(view.nano_views))
        for stream in streams:
            stream.begin()
        return streams

    def start_gather(self, parts: list[Tensor], streams: list[SideStream]) -> list[Tensor]:
        """All rows of each part; main has to wait for its stream."""
        gathered = []
        for lane, (part, stream) in enumerate(zip(parts, streams, strict=True)):
            stream.to_side()
            gathered.append(self.overlap.collectives.all_gather(part.contiguous(), lane))
            stream.leave()
        return gathered

    def start_reduce(self, part: Tensor, lane: int, stream: SideStream) -> Tensor:
        """The sum, or this rank's rows of it; main has to wait for the stream."""
        ops = self.overlap.collectives
        stream.to_side()
        stream.hold(part)
        total = (ops.reduce_scatter if self.sequence_parallel else ops.all_reduce)(part, lane)
        stream.leave()
        return total


class OverlappedLinear(torch.autograd.Function):
    """`y = x W^T + b + branch(x)` with its reductions and gathers, nano-batch by nano-batch.

    Column-parallel. Layout in: x `[T, 1, K]`, or `[T / n, 1, K]` under sequence parallelism; out:
    `[T, 1, N / n]`. Forward: an all-gather under sequence parallelism; backward: an all-reduce of
    dx, or a reduce-scatter. Row-parallel: in `[T, 1, K / n]`, out `[T, 1, N]` or `[T / n, 1, N]`;
    forward: an all-reduce or a reduce-scatter; backward: an all-gather under sequence parallelism.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        branch: AdapterBranch,
        view: MicroBatchView,
        traffic: Traffic,
    ) -> Tensor:
        streams = traffic.streams(view)
        rows = [nano.num_tokens for nano in view.nano_views]
        x_TK = x.flatten(0, -2)
        parts = list(x_TK.split(traffic.local_rows(view) if traffic.gathers_input else rows))
        if traffic.gathers_input:
            parts = traffic.start_gather(parts, streams)
        factors, outputs, saved = branch.factors, [], []
        for lane, (part, stream) in enumerate(zip(parts, streams, strict=True)):
            if traffic.gathers_input:
                stream.to_main()
            if factors is None:
                y_TN = torch.nn.functional.linear(part, weight_NK, bias_N)
            else:
                bound = branch.ops.bind(factors, view.nano_views[lane].rows)
                y_TN, s = bound.forward(part, weight_NK, bias_N)
                saved += [part, s]
            outputs.append(
                traffic.start_reduce(y_TN, lane, stream) if traffic.reduces_output else y_TN
            )
        for stream in streams:
            stream.to_main()
        ctx.save_for_backward(weight_NK, *saved)
        ctx.branch, ctx.factors, ctx.view, ctx.traffic = branch, factors, view, traffic
        ctx.x_shape = x.shape
        return torch.cat(outputs).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight_NK, *saved = ctx.saved_tensors
        view, traffic = ctx.view, ctx.traffic
        streams = traffic.streams(view)
        gathers = traffic.reduces_output and traffic.sequence_parallel
        rows = traffic.local_rows(view) if gathers else [v.num_tokens for v in view.nano_views]
        parts = list(dy.flatten(0, -2).contiguous().split(rows))
        if gathers:
            parts = traffic.start_gather(parts, streams)
        gradients = []
        for lane, (dy_TN, stream) in enumerate(zip(parts, streams, strict=True)):
            if gathers:
                stream.to_main()
            x_TK, s = saved[2 * lane : 2 * lane + 2] if saved else (None, None)
            dx = _Backward(ctx, weight_NK, view.nano_views[lane], x_TK, s, dy_TN)
            dx_TK = dx.input_gradient()
            gradients.append(
                traffic.start_reduce(dx_TK, lane, stream) if traffic.is_column else dx_TK
            )
            dx.factor_gradients()
        for stream in streams:
            stream.to_main()
        return torch.cat(gradients).view(ctx.x_shape), None, None, None, None, None


class _Backward:
    """One nano-batch's backward, dx first, so that its reduction has the rest beside it."""

    def __init__(
        self,
        ctx: Any,
        weight_NK: Tensor,
        view: MicroBatchView,
        x_TK: Tensor | None,
        s: Tensor | None,
        dy_TN: Tensor,
    ) -> None:
        has_factors = ctx.factors is not None
        self._bound = ctx.branch.ops.bind(ctx.factors, view.rows) if has_factors else None
        self._weight_NK = weight_NK
        self._x_TK, self._s, self._dy_TN = x_TK, s, dy_TN
        self._ds: Tensor | None = None

    def input_gradient(self) -> Tensor:
        """dx, on this rank."""
        if self._bound is None:
            return self._dy_TN @ self._weight_NK
        self._ds = self._bound.backward_up(self._dy_TN, self._s)
        return self._bound.dgrad(self._dy_TN, self._ds, self._weight_NK)

    def factor_gradients(self) -> None:
        """Adds those of the adapters to their slabs."""
        if self._bound is not None:
            window = (0, self._bound.rows.ends[-1])
            self._bound.backward_down(self._x_TK, self._dy_TN, self._s, self._ds, window)
