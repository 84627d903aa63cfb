"""Nano-batches that take turns, so that one's collectives run beside the others' compute.

Each nano-batch has a *lane*: a greenlet that runs layers' code on its rows, and a CUDA stream. The
code is cut where tensor parallelism communicates. A *compute piece* goes from the input
of a column-parallel linear to the partial sums that the row-parallel one makes of it (attention or
an MLP), on the main stream. Between two of them, on the lane's own stream: the reduction of the
partial sums, residual sum, norm, and with sequence parallelism the gathering. A lane hands over at
every column-parallel linear, so compute pieces alternate: 0, 1, 0, 1, ...

Backward goes the same way back, by a tape (`parallel.nano.lane_tape`). Layers that need no autograd
call `hand_over` and `hand_in` at the cuts and leave functions on a `DirectTape`. Others' linears
call `enter` and `leave`: pieces are recorded as separate autograd graphs, ended by detached tensors
at the cuts. Each is run backward on the stream that it was recorded on: the engine runs a node on
its forward's stream and makes the caller's stream wait for it, so it adds no waits.

Shapes: T rows of the nano-batch, n tensor-parallel ranks, H features.
"""

from __future__ import annotations

from collections.abc import Callable

import greenlet
import torch
from torch.autograd.graph import get_gradient_edge

from tlora_megatron.ops.routing.segments import (
    MicroBatchView,
    bind_micro_batch,
    current_micro_batch,
)
from tlora_megatron.parallel.nano.lane_tape import (
    DirectTape,
    Exchange,
    Gathered,
    Half,
    Module,
    Reduced,
    Tape,
)
from tlora_megatron.parallel.nano.side_stream import SideStream
from tlora_megatron.parallel.transport.tensor_collectives import TensorCollectives


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
        self._token: torch.Tensor | None = None
        self._tape: Tape | None = None
        self._residual: tuple[torch.Tensor | None, bool, torch.Tensor] | None = None
        self._half: Half | None = None
        self._replay: Module | None = None
        self._is_replaying = False
        self._replayed: torch.Tensor | None = None
        self._x_local: torch.Tensor | None = None
        self._exchanges: list[Exchange] = []
        self._gradient: torch.Tensor | None = None
        """Of the residual stream, on the way back."""

    def begin(
        self, hidden: torch.Tensor, *, records: bool, num_read: int | None = None
    ) -> torch.Tensor:
        """Begins layers that a tape is kept of, or not; returns what they begin with.

        Args:
            num_read: reductions whose results anything reads; those behind are left out.
        """
        torch.set_grad_enabled(records)
        if not records:
            return hidden
        if self._token is None:
            self._token = torch.empty((), device=hidden.device, requires_grad=True)
        self._tape = Tape(hidden.detach().requires_grad_(), self._token, num_read)
        return self._tape.entry

    def end(self, hidden: torch.Tensor) -> Tape | None:
        """Ends the tape with the layers' result."""
        tape, self._tape = self._tape, None
        if tape is not None:
            tape.out = get_gradient_edge(hidden)
        return tape

    def cut(self, residual: torch.Tensor, *, joint: bool) -> torch.Tensor:
        """Cuts the residual stream where attention or an MLP begins; returns what goes on.

        Args:
            joint: the norm for the next linear comes of what led here; else of what is returned.
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
        """Has the next compute piece, which is this module's, computed again in backward."""
        if self._tape is not None:
            self._replay = module

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Ends the elementwise piece at a column-parallel linear's input, hands over to the others,
        and returns, gathered, what the compute piece begins with.
        """
        if self._is_replaying:
            self._x_local = None
            return x
        half = None if self._tape is None else self._record(self._tape, x)
        replays = half is not None and half.replay is not None
        full = self.hand_over(x.detach(), keeps_local=half is not None and not replays)
        torch.set_grad_enabled(half is not None and not replays)
        if half is None:
            return full
        if self._x_local is None:
            half.x_leaf = full.requires_grad_()
            return full
        return Gathered.apply(full, self._token, half)

    def hand_over(self, x: torch.Tensor, *, keeps_local: bool) -> torch.Tensor:
        """Gathers x, has the others take their turns, and goes on on main with what is returned.

        Args:
            keeps_local: `take_local` may be asked for x.
        """
        full = self._over(self._collectives.all_gather, x) if self.gathers else x
        greenlet.getcurrent().parent.switch()
        self.stream.to_main()
        self._x_local = x if keeps_local and self.gathers else None
        return full

    def take_local(self) -> torch.Tensor | None:
        """This rank's rows of what `enter` returned, for backward to keep in its place; None where
        it may keep that. Who takes them calls `exchange` in backward."""
        x_local, self._x_local = self._x_local, None
        return x_local

    def exchange(self, part: torch.Tensor, finish: Callable[[torch.Tensor], None]) -> None:
        """In backward: has a tensor summed over the ranks, on the side, and `finish` called with it
        on main before this lane's next compute piece."""
        self._exchanges.append(Exchange(part, finish))

    def _record(self, tape: Tape, x: torch.Tensor) -> Half:
        assert self._residual is not None, "the residual stream must be cut before each linear"
        end = get_gradient_edge(x) if self.gathers else x
        half = Half(end, *self._residual, tape.leaf, self._replay)
        self._residual = self._replay = None
        tape.halves.append(half)
        self._half = half
        return half

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """Ends the compute piece with a row-parallel linear's partial sums; returns their sum, of
        which sequence parallelism leaves this rank's rows.
        """
        if self._is_replaying:
            self._replayed = y
            return y
        self.hand_in(y)
        tape, half, self._half = self._tape, self._half, None
        if tape is None or half is None:
            return self.reduce(y)
        if half.replay is None:
            half.y = get_gradient_edge(y)
        else:
            torch.set_grad_enabled(True)
        reduce = self.reduce if tape.is_read else None
        return Reduced.apply(y.detach(), self._token, half, reduce, self.spread)

    def hand_in(self, y: torch.Tensor) -> None:
        """Goes on on the side with what main has computed."""
        self.stream.to_side()
        self.stream.hold(y)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; of sequence parallelism's, this rank's rows."""
        ops = self._collectives
        return self._over(ops.reduce_scatter if self.gathers else ops.all_reduce, x)

    def spread(self, dx: torch.Tensor) -> torch.Tensor:
        """The way back of `reduce`: the gradient of all rows."""
        dx = dx.contiguous()
        return self._over(self._collectives.all_gather, dx) if self.gathers else dx

    def _over(
        self, collective: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        if x.dim() == 2:
            return collective(x, self.index)
        result = collective(x.flatten(0, -2), self.index)
        return result.view(-1, *x.shape[1:])

    def backward_begin(
        self, tape: Tape | DirectTape, dout: torch.Tensor, *, after_main: bool
    ) -> None:
        """The elementwise piece behind the last half.

        Args:
            dout: gradient of what `end` was given; the caller keeps it until `join`.
        """
        if after_main:
            self.stream.to_side()
        else:
            self.stream.resume()
        self._gradient = tape.begin(dout, self)

    def backward_half(self, tape: Tape | DirectTape) -> None:
        """The compute piece of the tape's last half on main, then the elementwise piece before it;
        takes it off the tape."""
        assert self._gradient is not None, "backward_begin comes first"
        self.join()
        dx = tape.compute(self)
        self.hand_in(dx)
        dx = self.reduce(dx)
        for exchange in self._exchanges:
            exchange.total = self._collectives.all_reduce(exchange.part, self.index)
        self._gradient = tape.reach(dx, self._gradient, self)

    def compute_again(self, module: Module, x: torch.Tensor) -> torch.Tensor:
        """Partial sums of a module that `replay` was told of, recorded."""
        self._is_replaying = True
        try:
            with Turn(self), torch.enable_grad():
                module(x)
        finally:
            self._is_replaying = False
        y, self._replayed = self._replayed, None
        assert y is not None, "the module must have a row-parallel linear"
        return y

    def backward_end(self) -> torch.Tensor:
        """The gradient of what `begin` was given, on the lane's stream."""
        gradient, self._gradient = self._gradient, None
        assert gradient is not None, "backward_begin comes first"
        return gradient

    def join(self) -> None:
        """Goes to main, which has then waited for all of this lane."""
        self.stream.to_main()
        for exchange in self._exchanges:
            assert exchange.total is not None, "sums are made on the side"
            exchange.finish(exchange.total)
        self._exchanges.clear()


_current: Lane | None = None


def current_lane() -> Lane | None:
    """The lane whose turn it is; None outside of nano-batches that take turns."""
    return _current


class Turn:
    """Makes it a lane's turn, and its nano-batch the one bound."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._before: tuple[Lane | None, MicroBatchView | None] = (None, None)

    def __enter__(self) -> None:
        global _current
        self._before = (_current, current_micro_batch())
        _current = self._lane
        bind_micro_batch(self._lane.view)

    def __exit__(self, *_: object) -> None:
        global _current
        _current, view = self._before
        bind_micro_batch(view)
