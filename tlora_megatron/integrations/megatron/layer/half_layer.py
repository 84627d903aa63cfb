"""Attention and MLP of a frozen layer without autograd: a chain of calls there, and one back.

Megatron's modules, autograd's graph and its hooks take the host longer than all launches of a layer
(docs/measurements, host_time), and at small shapes, nano-batches most of all, the GPU waits for the
host. A frozen layer needs none of them: no weight has a gradient, and what its linears, norm, heads
and SwiGLU save is known. So a half is run as a few calls, each of which returns the way back as a
function that holds what is saved. The modules' parameters, names and state dicts stay.

Shapes: T rows, H hidden features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.module_hooks import (
    hangs_on,
    hangs_on_all,
    packs_saved_tensors,
)
from tlora_megatron.integrations.megatron.layer.norm import RMSNorm
from tlora_megatron.ops.frozen.frozen_parts import Vjp
from tlora_megatron.ops.routing.segments import MicroBatchView
from tlora_megatron.parallel.nano.lane_tape import DirectHalf, DirectTape
from tlora_megatron.parallel.nano.lanes import Lane

Inner = Callable[[Tensor, MicroBatchView, Lane | None], tuple[Tensor, Vjp]]


@dataclass(frozen=True, slots=True, eq=False)
class HalfLayer:
    """Attention or an MLP, and the norm before it."""

    norm: RMSNorm
    column: Any
    inner: Inner
    """What stands between the linears."""
    row: Any
    recomputes: bool
    """Forward keeps the input only."""

    def compute(
        self, x: Tensor, view: MicroBatchView, lane: Lane | None, *, keeps: bool
    ) -> tuple[Tensor, Vjp]:
        """From the norm's output to the row-parallel linear's, and the way back.

        Args:
            x: `[T, H]`; gathered where there is a lane, which also reduces what is returned.
            keeps: whether the way back is wanted; without, what is returned for it leads nowhere.
        """
        if keeps and self.recomputes:
            y, _ = self._chain(x, view, lane, keeps=False)
            return y, self._recomputing(x, view, lane)
        return self._chain(x, view, lane, keeps=keeps)

    def _chain(
        self, x: Tensor, view: MicroBatchView, lane: Lane | None, *, keeps: bool
    ) -> tuple[Tensor, Vjp]:
        backs: list[Vjp] = []
        for run in (self.column.product_vjp, self.inner, self.row.product_vjp):
            x, back = run(x, view, lane)
            if keeps:
                backs.append(back)
            del back  # what it holds goes with it
        return x, functools.partial(_walk_back, backs)

    def _recomputing(self, x: Tensor, view: MicroBatchView, lane: Lane | None) -> Vjp:
        def vjp(dy: Tensor) -> Tensor:
            _, back = self._chain(x, view, lane, keeps=True)
            return back(dy)

        return vjp


def _walk_back(backs: list[Vjp], grad: Tensor) -> Tensor:
    """Through all of a chain; lets go of each part's saved tensors behind it."""
    while backs:
        grad = backs.pop()(grad)
    return grad


def runs_direct(modules: Sequence[nn.Module], halves: Sequence[HalfLayer]) -> bool:
    """Whether halves may be run so now: all linears give their product alone, and nobody has hung
    anything on a module whose forward is then not called, or on what autograd would save.

    Args:
        modules: beside those of the halves.
    """
    if hangs_on_all() or packs_saved_tensors():
        return False
    for half in halves:
        if not (hasattr(half.column, "product_vjp") and hasattr(half.row, "product_vjp")):
            return False
        if hangs_on(half.norm) or hangs_on(half.column) or hangs_on(half.row):
            return False
    return not any(map(hangs_on, modules))


def run_layer(halves: Sequence[HalfLayer], hidden: Tensor, view: MicroBatchView) -> Tensor:
    """`[T, 1, H]` through a layer's halves, as one node of autograd's graph."""
    if torch.is_grad_enabled():
        return _Layer.apply(hidden, halves, view)
    return _run_whole(halves, hidden, view, None)


def _run_whole(
    halves: Sequence[HalfLayer], hidden: Tensor, view: MicroBatchView, tape: DirectTape | None
) -> Tensor:
    x, residual = hidden.flatten(0, -2), None
    for half in halves:
        residual, normed, norm_back = half.norm.add_vjp(x, residual)
        x, compute_back = half.compute(normed, view, None, keeps=tape is not None)
        if tape is not None:
            tape.halves.append(DirectHalf(compute_back, norm_back))
        del norm_back, compute_back
    assert residual is not None, "a layer has halves"
    # No view of the sum: Megatron's pipeline frees what a stage has sent.
    return residual.view(hidden.shape) + x.view(hidden.shape)


class _Layer(torch.autograd.Function):
    """A layer whose linears reduce by themselves."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, halves: Sequence[HalfLayer], view: MicroBatchView
    ) -> Tensor:
        ctx.tape = DirectTape()
        return _run_whole(halves, hidden.detach(), view, ctx.tape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        halves = ctx.tape.halves
        assert halves, "a layer goes back once"
        gradient = dout.contiguous().flatten(0, -2)
        while halves:
            half = halves.pop()
            gradient = half.norm(gradient, half.compute(gradient))
        return gradient.unsqueeze(1), None, None


def run_in_lane(
    halves: Sequence[HalfLayer], hidden: Tensor, lane: Lane, tape: DirectTape | None
) -> tuple[Tensor, Tensor | None]:
    """A nano-batch's `[T, H]` through the halves of several layers.

    Returns:
        What the last half adds to the residual stream, not yet summed over the ranks, and the
        residual stream, which it is still to be added to; without halves what came in, and None.
    """
    x, residual = hidden, None
    for half in halves:
        if residual is not None:
            x = lane.reduce(x)
        residual, normed, norm_back = half.norm.add_vjp(x, residual)
        full = lane.hand_over(normed, keeps_local=not half.recomputes)
        x, compute_back = half.compute(full, lane.view, lane, keeps=tape is not None)
        lane.hand_in(x)
        if tape is not None:
            tape.halves.append(DirectHalf(compute_back, norm_back))
        del full, normed, norm_back, compute_back
    return x, residual
