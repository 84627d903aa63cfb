"""Nano-batches that take turns, so that one's collectives run beside the others' compute.

Each nano-batch has a *lane*: a greenlet that runs layers' code on its rows, and a CUDA stream. A
*compute piece* goes from the input of a column-parallel linear to the partial sums that the
row-parallel one makes of it (attention or an MLP: a *sublayer*), on the main stream. Between two of
them, on the lane's own stream: reduction, residual sum, norm, and with sequence parallelism the
gathering. A lane yields at every column-parallel linear, so compute pieces alternate: 0, 1, 0, ...

Backward goes the same way back, by a tape (`parallel.lane_tape`). Layers that need no autograd call
`gather_and_yield` and `to_side_stream` at the cuts and leave functions on a `VjpTape`. Others'
linears call `begin_compute` and `end_compute`: pieces are separate autograd graphs, ended by
detached tensors, each run backward on the stream that it was recorded on.

Shapes: T rows of the nano-batch, n tensor-parallel ranks, H features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import greenlet
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tlora_megatron.ops.routing import MicroBatchView, bind_micro_batch, current_micro_batch
from tlora_megatron.parallel.collectives import Pending, TensorCollectives
from tlora_megatron.parallel.lane_tape import (
    AutogradTape,
    Exchange,
    Gathered,
    Module,
    RecordedSublayer,
    Reduced,
    SideStream,
    VjpTape,
)


class Lane:
    """One nano-batch's way through layers and back.

    Args:
        gathers: sequence parallelism: T / n rows outside of compute pieces.
    """

    def __init__(
        self,
        index: int,
        view: MicroBatchView,
        collectives: TensorCollectives,
        stream: SideStream,
        *,
        gathers: bool,
    ) -> None:
        self.index = index
        self.view = view
        self.stream = stream
        self.gathers = gathers
        self._collectives = collectives
        self._token: Tensor | None = None
        self._tape: AutogradTape | None = None
        self._residual: tuple[Tensor | None, bool, Tensor] | None = None
        self._sublayer: RecordedSublayer | None = None
        self._replay: Module | None = None
        self._is_replaying = False
        self._replayed: Tensor | None = None
        self._x_local: Tensor | None = None
        self._exchanges: list[Exchange] = []
        self._gradient: Tensor | None = None
        """In backward: gradient of the residual stream."""

    def begin(self, hidden: Tensor, *, records: bool, num_read: int | None = None) -> Tensor:
        """Begins layers; returns the tensor that they begin with.

        Args:
            num_read: number of reductions whose results anything reads; later ones are left out.
        """
        torch.set_grad_enabled(records)
        if not records:
            return hidden
        if self._token is None:
            self._token = torch.empty((), device=hidden.device, requires_grad=True)
        self._tape = AutogradTape(hidden.detach().requires_grad_(), self._token, num_read)
        return self._tape.entry

    def end(self, hidden: Tensor) -> AutogradTape | None:
        """Ends the tape with the layers' result."""
        tape, self._tape = self._tape, None
        if tape is not None:
            tape.out = get_gradient_edge(hidden)
        return tape

    def detach_residual(self, residual: Tensor, *, joint: bool) -> Tensor:
        """Detaches the residual stream where a sublayer begins; returns what goes on.

        Args:
            joint: the norm for the next linear was computed from what led here; otherwise it will
                be computed from what is returned.
        """
        tape = self._tape
        if tape is None:
            return residual
        if residual is tape.entry and not joint:
            self._residual = (None, False, residual)
            return residual
        leaf = residual.detach().requires_grad_()
        self._residual = (residual, joint, leaf)
        return leaf

    def replay(self, module: Module) -> None:
        """Makes backward compute the next compute piece, which is this module's, again."""
        if self._tape is not None:
            self._replay = module

    def begin_compute(self, x: Tensor) -> Tensor:
        """Ends the elementwise piece at a column-parallel linear's input and lets others run.

        Returns:
            The compute piece's input, gathered.
        """
        if self._is_replaying:
            self._x_local = None
            return x
        sublayer = None if self._tape is None else self._record(self._tape, x)
        replays = sublayer is not None and sublayer.replay is not None
        full = self.gather_and_yield(x.detach(), keeps_local=sublayer is not None and not replays)
        torch.set_grad_enabled(sublayer is not None and not replays)
        if sublayer is None:
            return full
        if self._x_local is None:
            sublayer.x_leaf = full.requires_grad_()
            return full
        return Gathered.apply(full, self._token, sublayer)

    def gather_and_yield(self, x: Tensor, *, keeps_local: bool) -> Tensor:
        """Gathers x, lets the other lanes take their turns, and continues on the main stream.

        Args:
            keeps_local: keep x for `take_local`.

        Returns:
            x of all ranks.
        """
        full = self._over(self._collectives.all_gather, x) if self.gathers else x
        self.yield_turn()
        self._x_local = x if keeps_local and self.gathers else None
        return full

    def yield_turn(self) -> None:
        """Lets the other lanes take their turns, and continues on the main stream."""
        greenlet.getcurrent().parent.switch()
        self.stream.to_main()

    def gather_together(self, tensors: Sequence[Tensor]) -> list[Pending]:
        """Gathers all ranks' rows of several tensors, on the side stream."""
        return [Pending(self._collectives.all_gather(x, self.index), None) for x in tensors]

    def sum_ranks(self, x: Tensor) -> Pending:
        """Sums over the ranks, on the side stream; x may be overwritten."""
        return Pending(self._collectives.all_reduce(x, self.index), None)

    def take_local(self) -> Tensor | None:
        """Returns this rank's rows of what was gathered, which backward must keep in its place.

        None if backward may keep all rows. The caller must call `exchange` in backward.
        """
        x_local, self._x_local = self._x_local, None
        return x_local

    def exchange(self, part: Tensor, finish: Callable[[Tensor], None]) -> None:
        """In backward: sums a tensor over the ranks on the side stream.

        `finish` is called with the sum on main, before this lane's next compute piece.
        """
        self._exchanges.append(Exchange(part, finish))

    def _record(self, tape: AutogradTape, x: Tensor) -> RecordedSublayer:
        assert self._residual is not None, "the residual stream must be detached before each linear"
        end = get_gradient_edge(x) if self.gathers else x
        sublayer = RecordedSublayer(end, *self._residual, tape.leaf, self._replay)
        self._residual = self._replay = None
        tape.sublayers.append(sublayer)
        self._sublayer = sublayer
        return sublayer

    def end_compute(self, y: Tensor) -> Tensor:
        """Ends the compute piece with a row-parallel linear's partial sums.

        Returns:
            Their sum; under sequence parallelism this rank's rows of it.
        """
        if self._is_replaying:
            self._replayed = y
            return y
        self.to_side_stream(y)
        tape, sublayer, self._sublayer = self._tape, self._sublayer, None
        if tape is None or sublayer is None:
            return self.reduce(y)
        if sublayer.replay is None:
            sublayer.y = get_gradient_edge(y)
        else:
            torch.set_grad_enabled(True)
        reduce = self.reduce if tape.is_read else None
        return Reduced.apply(y.detach(), self._token, sublayer, reduce, self.spread)

    def to_side_stream(self, y: Tensor) -> None:
        """Continues on the lane's own stream with what main has computed."""
        self.stream.to_side()
        self.stream.hold(y)

    def reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks; under sequence parallelism this rank's rows of it."""
        ops = self._collectives
        return self._over(ops.reduce_scatter if self.gathers else ops.all_reduce, x)

    def spread(self, dx: Tensor) -> Tensor:
        """Undoes `reduce` in backward: returns the gradient of all rows."""
        dx = dx.contiguous()
        return self._over(self._collectives.all_gather, dx) if self.gathers else dx

    def _over(self, collective: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
        if x.dim() == 2:
            return collective(x, self.index)
        result = collective(x.flatten(0, -2), self.index)
        return result.view(-1, *x.shape[1:])

    def backward_begin(
        self, tape: AutogradTape | VjpTape, dout: Tensor, *, after_main: bool
    ) -> None:
        """Runs the elementwise piece behind the last sublayer.

        Args:
            dout: gradient of what `end` was given; the caller keeps it until `join`.
            after_main: begin after all that main has been given.
        """
        if after_main:
            self.stream.to_side()
        else:
            self.stream.resume()
        self._gradient = tape.begin(dout, self)

    def backward_sublayer(self, tape: AutogradTape | VjpTape) -> None:
        """Runs the tape's last sublayer and the elementwise piece before it, and takes it off."""
        assert self._gradient is not None, "backward_begin comes first"
        self.join()
        dx = tape.compute(self)
        self.to_side_stream(dx)
        dx = self.reduce(dx)
        for exchange in self._exchanges:
            exchange.total = self._collectives.all_reduce(exchange.part, self.index)
        self._gradient = tape.reach(dx, self._gradient, self)

    def compute_again(self, module: Module, x: Tensor) -> Tensor:
        """Returns the partial sums of a module that `replay` was given, recorded."""
        self._is_replaying = True
        try:
            with turn(self), torch.enable_grad():
                module(x)
        finally:
            self._is_replaying = False
        y, self._replayed = self._replayed, None
        assert y is not None, "the module must have a row-parallel linear"
        return y

    def backward_end(self) -> Tensor:
        """Returns the gradient of what `begin` was given, on the lane's stream."""
        gradient, self._gradient = self._gradient, None
        assert gradient is not None, "backward_begin comes first"
        return gradient

    def join(self) -> None:
        """Continues on main, which waits for all of this lane first."""
        self.stream.to_main()
        for exchange in self._exchanges:
            assert exchange.total is not None, "sums are made on the side"
            exchange.finish(exchange.total)
        self._exchanges.clear()


_current: Lane | None = None


def current_lane() -> Lane | None:
    """The lane whose turn it is; None outside of nano-batches that take turns."""
    return _current


@contextmanager
def turn(lane: Lane) -> Iterator[None]:
    """Makes a lane the current one, and its nano-batch the bound one."""
    global _current
    before, view = _current, current_micro_batch()
    _current = lane
    bind_micro_batch(lane.view)
    try:
        yield
    finally:
        _current = before
        bind_micro_batch(view)
