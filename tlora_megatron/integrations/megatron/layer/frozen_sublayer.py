"""Attention and MLP of a frozen layer without autograd: a chain of calls forward, and one back.

Megatron's modules, autograd's graph and its hooks take the host longer than all launches of a layer
(docs/measurements, host_time), and at small shapes, nano-batches most of all, the GPU waits for the
host. A frozen layer needs none of them: no weight has a gradient, and what its linears, norm, heads
and SwiGLU save is known. So a sublayer is run as a few calls, each of which returns the way back as
a function that holds what is saved. The modules' parameters, names and state dicts stay.

Shapes: T rows, H hidden features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.modules import (
    hangs_on,
    hangs_on_all,
    packs_saved_tensors,
)
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import Norm
from tlora_megatron.layers.linear import QuantisedInput, gather_codes, takes_codes
from tlora_megatron.layers.quantised_linear import held_codes
from tlora_megatron.layers.transformer_engine import one_scale
from tlora_megatron.ops.frozen.parts import Vjp
from tlora_megatron.ops.frozen.rms_norm import Beside, add_rms_norm_vjp, norm_into
from tlora_megatron.ops.quantised.rows import OneScale, pass_rows
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.ops.routing import MicroBatchView, bind_current
from tlora_megatron.parallel.lane_tape import VjpSublayer, VjpTape
from tlora_megatron.parallel.lanes import Lane

Inner = Callable[[Tensor, MicroBatchView, Lane | None], tuple[Tensor, Vjp]]
Restore = Callable[[], None]


def no_replay() -> Callable[[], AbstractContextManager[None]]:
    """A repeated forward needs nothing around it."""
    return nullcontext


@dataclass(frozen=True, slots=True, eq=False)
class FrozenSublayer:
    """Attention or an MLP of a frozen layer, and the norm before it."""

    norm: Norm
    column: Any
    inner: Inner
    """The part between the linears."""
    row: Any
    recomputes: bool
    """Forward keeps the input only; backward computes the rest again."""
    asks_micro_batch: bool = False
    """It also does so for each micro-batch that names `selective`."""
    replay: Callable[[], Callable[[], AbstractContextManager[None]]] = no_replay
    """Called in forward, returns what the repetition of it in backward enters."""
    recomputes_norm: bool = False
    """Forward lets go of the norm's output, and backward computes it again; not in lanes."""

    def repeats(self, view: MicroBatchView) -> bool:
        """Returns True if a micro-batch's forward keeps the input only."""
        return self.recomputes or (self.asks_micro_batch and view.recompute == "selective")

    def compute(
        self,
        x: Tensor | QuantisedInput,
        view: MicroBatchView,
        lane: Lane | None,
        *,
        keeps: bool,
        restore: Restore | None = None,
    ) -> tuple[Tensor, Vjp]:
        """Computes the row-parallel linear's output from the norm's.

        Args:
            x: `[T, H]`; gathered where there is a lane, which also reduces what is returned. A lane
                may have gathered codes instead.
            keeps: record the backward pass; if False, the returned vjp must not be called.
            restore: called in backward before x is read; the caller lets go of its values.

        Returns:
            The output and its vjp.
        """
        if not (keeps and self.repeats(view)):
            return self._chain(x, view, lane, keeps=keeps, restore=restore)
        y, _ = self._chain(x, view, lane, keeps=False)
        surroundings = self.replay()

        def vjp(dy: Tensor) -> Tensor:
            with surroundings():
                _, back = self._chain(x, view, lane, keeps=True)
            return back(dy)

        return y, _restoring(restore, vjp)

    def _chain(
        self,
        x: Tensor | QuantisedInput,
        view: MicroBatchView,
        lane: Lane | None,
        *,
        keeps: bool,
        restore: Restore | None = None,
    ) -> tuple[Tensor, Vjp]:
        backs: list[Vjp] = []
        value: Any = x
        del x
        for run in (self.column.product_vjp, self.inner, self.row.product_vjp):
            value, back = run(value, view, lane)
            if keeps:
                backs.append(back)
            del back  # what it holds goes with it
        if backs:
            backs[0] = _restoring(restore, backs[0])  # the linear that reads x
        return value, functools.partial(walk_back, backs)


def _restoring(restore: Restore | None, vjp: Vjp) -> Vjp:
    if restore is None:
        return vjp

    def restored(dy: Tensor) -> Tensor:
        restore()
        return vjp(dy)

    return restored


def walk_back(backs: list[Vjp], grad: Tensor) -> Tensor:
    """Goes back through a chain; releases each part's saved tensors behind it."""
    while backs:
        grad = backs.pop()(grad)
    return grad


def runs_direct(modules: Sequence[nn.Module], sublayers: Sequence[FrozenSublayer]) -> bool:
    """Returns True if sublayers may be run without their modules' forwards now.

    All linears must give their product alone, and there must be no hook on a module whose forward
    is then not called, nor on tensors that autograd would save.

    Args:
        modules: those that are asked in addition to the sublayers' linears.
    """
    if hangs_on_all() or packs_saved_tensors():
        return False
    for sublayer in sublayers:
        if not (gives_product(sublayer.column) and gives_product(sublayer.row)):
            return False
        if hangs_on(sublayer.column) or hangs_on(sublayer.row):
            return False
    return not any(map(hangs_on, modules))


def gives_product(linear: Any) -> bool:
    """True for a linear that has adapters, and gives its product without autograd."""
    return hasattr(linear, "product_vjp") and hasattr(linear, "tlora_adapters")


def run_layer(sublayers: Sequence[FrozenSublayer], hidden: Tensor, view: MicroBatchView) -> Tensor:
    """Runs `[T, 1, H]` through a layer's sublayers, as one node of autograd's graph."""
    if not torch.is_grad_enabled():
        return _run_whole(sublayers, hidden, view)
    out = _Layer.apply(hidden, sublayers, view, hidden.__dict__.get(_ADDED_BY))
    row = _codes_of_all_rows(sublayers[-1].row)
    if row is not None:
        setattr(out, _ADDED_BY, row)
    return out


_ADDED_BY = "tlora_added_by"
"""On hidden states: the quantised linear that their gradient goes to, which so gets its codes."""


def _run_whole(
    sublayers: Sequence[FrozenSublayer],
    hidden: Tensor,
    view: MicroBatchView,
    row: QuantWeight | OneScale | None = None,
    tape: VjpTape | None = None,
) -> Tensor:
    x, residual = hidden.flatten(0, -2), None
    for sublayer in sublayers:
        column = _coded_column(sublayer.column)
        beside = None if column is None and row is None else Beside(column, row)
        row = _codes_of_all_rows(sublayer.row)
        norm = sublayer.norm.norm_weight
        residual, normed, norm_back = add_rms_norm_vjp(x, residual, norm, beside)
        keeps, restore = tape is not None, None
        if keeps and sublayer.recomputes_norm:
            restore = functools.partial(_norm_again, sublayer.norm, residual, normed)
        x, compute_back = sublayer.compute(normed, view, None, keeps=keeps, restore=restore)
        if x.dtype != residual.dtype:
            compute_back = _narrowing(compute_back, x.dtype)
        if restore is not None:
            normed.untyped_storage().resize_(0)  # whatever the linear saved is this memory
        if tape is not None:
            tape.sublayers.append(VjpSublayer(compute_back, norm_back))
        del norm_back, compute_back
    assert residual is not None, "a layer has sublayers"
    # No view of the sum: Megatron's pipeline frees what a stage has sent.
    return residual.view(hidden.shape) + x.view(hidden.shape)


def _coded_column(linear: Any) -> QuantWeight | OneScale | None:
    """Returns the codes of a linear that multiplies those of its rows, gathered or not."""
    held = held_codes(linear)
    if held is None:
        return one_scale(linear)
    if takes_codes(linear.tlora_adapters.gemm, held):
        return held
    return _codes_of_all_rows(linear)


def _codes_of_all_rows(linear: Any) -> QuantWeight | OneScale | None:
    """Returns the codes of a linear that has all rows beside it, instead of gathering them."""
    held = held_codes(linear)
    if held is None:
        return one_scale(linear)
    layout = linear.tlora_adapters.gemm.layout
    return None if layout.sequence_parallel and layout.tp_size > 1 else held


def _narrowing(vjp: Vjp, dtype: torch.dtype) -> Vjp:
    """Takes the gradient of an fp32 stream to linears that are narrower."""
    return lambda dy: vjp(dy.to(dtype))


def _norm_again(norm: Norm, total: Tensor, normed: Tensor) -> None:
    """Computes a norm's output, whose memory was given back, into its place."""
    normed.untyped_storage().resize_(normed.nbytes)
    norm_into(normed, total, norm.norm_weight)


class _Layer(torch.autograd.Function):
    """One layer, whose linears reduce by themselves, as a node of autograd's graph.

    Of a micro-batch that names `full` it keeps the input only, and backward runs it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        sublayers: Sequence[FrozenSublayer],
        view: MicroBatchView,
        row: QuantWeight | OneScale | None,
    ) -> Tensor:
        run = functools.partial(_run_whole, sublayers, hidden.detach(), view, row)
        is_again = view.recompute == "full"
        ctx.tape, ctx.again = (None, bind_current(run)) if is_again else (VjpTape(), None)
        return run(ctx.tape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        again, ctx.again = ctx.again, None
        if again is not None:
            ctx.tape = VjpTape()
            again(ctx.tape)
            del again  # and with it the layer's input
        sublayers = ctx.tape.sublayers
        assert sublayers, "a layer goes back once"
        gradient = pass_rows(dout, dout.contiguous().flatten(0, -2))
        while sublayers:
            sublayer = sublayers.pop()
            gradient = sublayer.norm(gradient, sublayer.compute(gradient))
        return pass_rows(gradient, gradient.unsqueeze(1)), None, None, None


def run_in_lane(
    sublayers: Sequence[FrozenSublayer], hidden: Tensor, lane: Lane, tape: VjpTape | None
) -> tuple[Tensor, Tensor | None]:
    """Runs a nano-batch's `[T, H]` through the sublayers of several layers.

    Args:
        tape: receives the way back; None = none is wanted.

    Returns:
        The last sublayer's output, not yet summed over the ranks, and the residual stream that it
        is still to be added to. Without sublayers: `hidden`, and None.
    """
    x, residual = hidden, None
    for sublayer in sublayers:
        if residual is not None:
            x = lane.reduce(x)
        column = held_codes(sublayer.column)
        beside = None if column is None else Beside(_coded_column(sublayer.column), None)
        norm = sublayer.norm.norm_weight
        residual, normed, norm_back = add_rms_norm_vjp(x, residual, norm, beside)
        full = _gather(sublayer, normed, lane)
        x, compute_back = sublayer.compute(full, lane.view, lane, keeps=tape is not None)
        lane.to_side_stream(x)
        if tape is not None:
            tape.sublayers.append(VjpSublayer(compute_back, norm_back))
        del full, normed, norm_back, compute_back
    return x, residual


def _gather(sublayer: FrozenSublayer, normed: Tensor, lane: Lane) -> Tensor | QuantisedInput:
    """Gathers a norm's output, or its codes where they are enough, and lets other lanes run."""
    held = held_codes(sublayer.column)
    if held is not None:
        gemm = sublayer.column.tlora_adapters.gemm
        quantised = gather_codes(normed, held, gemm, lane.view, lane)
        if quantised is not None:
            lane.yield_turn()
            return quantised
    return lane.gather_and_yield(normed, keeps_local=not sublayer.repeats(lane.view))
