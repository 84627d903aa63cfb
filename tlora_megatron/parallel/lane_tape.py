"""Tapes: everything that a lane keeps in forward to be able to go backward, on its own stream.

Memory: what is allocated on one stream and read on the other must not be given out again too early.
Every to-and-fro waits for all the other stream was given, so a tensor made on the side and read on
main is safe by itself: the side stream's next work waits for main. A tensor made on main and read
on the side must be given to `hold`: main continues without waiting.

CUDA_DEVICE_MAX_CONNECTIONS must not be 1: the GPU would start kernels in launch order over all
streams, and a norm that waits for its collective would hold up every GEMM behind it.

An `AutogradTape` holds graphs that autograd has recorded while any layers' code ran. A `VjpTape`
holds functions that lead back, of layers that need no autograd. Both go back one sublayer
(attention or MLP) at a time: `begin`, then `compute` and `reach` for each.

"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge

from tlora_megatron.ops.frozen.parts import End, Vjp, run_backward

_PRIORITY = -1
"""Above what main mostly runs, so that a norm or a copy goes before the next kernel's blocks, but
not above the fused GEMM (`kPriority` of lora_gemm.cuh): between two of its clusters a norm of
thousands of blocks would hold the last ones up until the others have done their tiles."""


class SideStream:
    """The side stream of a CPU: work runs in the order of the code, so there is nothing to do."""

    def begin(self) -> None:
        """Remembers the current stream as the main one."""

    def to_side(self) -> None:
        """Continues on this stream, after all that main has been given."""

    def resume(self) -> None:
        """Continues on this stream; main must have been given nothing for it since."""

    def to_main(self) -> None:
        """Continues on main, after all that this stream was given; releases held tensors."""

    def hold(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor of main's alive until main has waited for its readers here."""

    def leave(self) -> None:
        """Makes main the current stream without waiting, after an error too."""


class CudaSideStream(SideStream):
    """A stream beside main; the device waits, by events, never the host."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device, priority=_PRIORITY)
        self._main = torch.cuda.current_stream(device)
        # A wait takes the event as it was recorded last, so one for each direction will do.
        self._main_reached, self._side_reached = torch.cuda.Event(), torch.cuda.Event()
        self._held: list[torch.Tensor] = []

    def begin(self) -> None:
        self._main = torch.cuda.current_stream(self._side.device)

    def to_side(self) -> None:
        self._main_reached.record(self._main)
        self._side.wait_event(self._main_reached)
        torch.cuda.set_stream(self._side)

    def resume(self) -> None:
        torch.cuda.set_stream(self._side)

    def to_main(self) -> None:
        self._side_reached.record(self._side)
        self._main.wait_event(self._side_reached)
        torch.cuda.set_stream(self._main)
        self._held.clear()

    def hold(self, tensor: torch.Tensor) -> None:
        self._held.append(tensor)

    def leave(self) -> None:
        torch.cuda.set_stream(self._main)


def make_side_stream(device: torch.device) -> SideStream:
    return CudaSideStream(device) if device.type == "cuda" else SideStream()


Module = Callable[[torch.Tensor], Any]
Transport = Callable[[torch.Tensor], torch.Tensor]


class WayBack(Protocol):
    """The part of a lane that tapes use."""

    def spread(self, dx: torch.Tensor) -> torch.Tensor:
        """Undoes a reduction: returns the gradient of all rows."""

    def compute_again(self, module: Module, x: torch.Tensor) -> torch.Tensor:
        """Computes a piece's partial sums again, recorded."""


@dataclass(slots=True, eq=False)
class VjpSublayer:
    """The backward pass of attention or an MLP as two functions, which hold what is saved."""

    compute: Vjp
    """Takes the gradient of the row-parallel linear's sums and returns that of the column-parallel
    one's input, not yet summed over the ranks."""
    norm: Vjp
    """Takes the gradients of the residual stream and of its norm and returns that of the residual
    stream before the previous sublayer has added to it, which is also that of what it added."""


@dataclass(slots=True, eq=False)
class VjpTape:
    """The backward pass of consecutive layers in one lane, without autograd."""

    sublayers: list[VjpSublayer] = field(default_factory=list)
    norm: Vjp | None = None
    """The final norm's `VjpSublayer.norm`; None = the layers end with the residual stream."""
    dy: torch.Tensor | None = None
    """In backward: the gradient of the last sublayer's sums."""

    def begin(self, dout: torch.Tensor, lane: WayBack) -> torch.Tensor:
        """Returns the gradient of the residual stream behind the last sublayer."""
        norm, self.norm = self.norm, None
        return self._spread(dout if norm is None else norm(None, dout), lane)

    def compute(self, lane: WayBack) -> torch.Tensor:
        """Runs the last sublayer's compute piece; returns its input's gradient, not yet reduced."""
        dy, self.dy = self.dy, None
        return self.sublayers[-1].compute(dy)

    def reach(self, dx: torch.Tensor, gradient: torch.Tensor, lane: WayBack) -> torch.Tensor:
        """Takes the last sublayer off, through the elementwise piece before it.

        Args:
            dx: gradient of the norm's output.
            gradient: of the residual stream, so far.

        Returns:
            The gradient of the residual stream before that sublayer.
        """
        return self._spread(self.sublayers.pop().norm(gradient, dx), lane)

    def _spread(self, gradient: torch.Tensor, lane: WayBack) -> torch.Tensor:
        if self.sublayers:
            self.dy = lane.spread(gradient)
        return gradient


@dataclass(slots=True, eq=False)
class RecordedSublayer:
    """Autograd's graphs of attention or an MLP, and of the elementwise piece that leads to it."""

    x: End
    """The column-parallel linear's input, before it is gathered."""
    residual: torch.Tensor | None
    """The residual stream at the elementwise piece's end; None where nothing was added to it."""
    is_joint: bool
    """x and the residual end the same graph; otherwise x was computed from `leaf`."""
    leaf: torch.Tensor
    """The residual stream, detached; later pieces begin with it."""
    before: torch.Tensor
    """The leaf that the elementwise piece began with."""
    replay: Module | None
    """Computes the compute piece again in backward; None where its graph is kept."""
    x_leaf: torch.Tensor | None = None
    """The column-parallel linear's input; None where it was gathered: nothing needs all of it."""
    dx: torch.Tensor | None = None
    """Its gradient, where it was gathered."""
    y: GradientEdge | None = None
    """The row-parallel linear's partial sums."""
    dy: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Exchange:
    """A small sum over the ranks that the gradients of factors wait for."""

    part: torch.Tensor
    finish: Callable[[torch.Tensor], None]
    total: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class AutogradTape:
    """The backward pass of consecutive layers in one lane, as autograd's graphs."""

    entry: torch.Tensor
    token: torch.Tensor
    """An input that requires grad, for the nodes of reductions: as a leaf, the partial sums
    themselves would be kept alive."""
    num_read: int | None
    """Number of reductions whose results are read; None = all."""
    sublayers: list[RecordedSublayer] = field(default_factory=list)
    out: GradientEdge | None = None

    @property
    def is_read(self) -> bool:
        """True if anything reads the reduction of the sublayer under way."""
        return self.num_read is None or len(self.sublayers) <= self.num_read

    @property
    def leaf(self) -> torch.Tensor:
        """The tensor that the piece under way began with."""
        return self.sublayers[-1].leaf if self.sublayers else self.entry

    def begin(self, dout: torch.Tensor, lane: WayBack) -> torch.Tensor:
        """Returns the gradient of the residual stream behind the last sublayer."""
        assert self.out is not None, "a tape must have ended"
        return self._grad((self.out,), (dout,), self.leaf)

    def compute(self, lane: WayBack) -> torch.Tensor:
        """Runs the last sublayer's compute piece; returns its input's gradient, not yet reduced."""
        sublayer = self.sublayers[-1]
        assert sublayer.dy is not None, "later pieces come first"
        y: Any = sublayer.y
        if sublayer.replay is not None:
            assert sublayer.x_leaf is not None, "what is computed again keeps its input"
            y = lane.compute_again(sublayer.replay, sublayer.x_leaf)
        run_backward((y,), (sublayer.dy,))  # without inputs, or Megatron's checkpoints refuse
        dx = sublayer.dx if sublayer.x_leaf is None else sublayer.x_leaf.grad
        assert dx is not None, "the compute piece must use its input"
        sublayer.x_leaf = sublayer.dx = sublayer.y = sublayer.dy = None
        return dx

    def reach(self, dx: torch.Tensor, gradient: torch.Tensor, lane: WayBack) -> torch.Tensor:
        """Takes the last sublayer off; see `VjpTape.reach`."""
        sublayer = self.sublayers.pop()
        if sublayer.is_joint:
            assert sublayer.residual is not None, "a joint cut has a graph"
            return self._grad((sublayer.x, sublayer.residual), (dx, gradient), sublayer.before)
        (dleaf,) = run_backward((sublayer.x,), (dx,), (sublayer.leaf,))
        dleaf = dleaf + gradient
        if sublayer.residual is not None:
            dleaf = self._grad((sublayer.residual,), (dleaf,), sublayer.before)
        return dleaf

    def _grad(
        self, outputs: tuple[End, ...], grads: tuple[torch.Tensor, ...], leaf: torch.Tensor
    ) -> torch.Tensor:
        """Runs an elementwise piece back to its leaf and to the reduction that it begins with."""
        return run_backward(outputs, grads, (leaf, self.token))[0]


class Gathered(torch.autograd.Function):
    """Hands on a compute piece's gathered input without keeping it for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, token: torch.Tensor, sublayer: RecordedSublayer
    ) -> torch.Tensor:
        ctx.sublayer = sublayer
        return x

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, ...]:
        ctx.sublayer.dx = dx
        return None, None, None


class Reduced(torch.autograd.Function):
    """Reduces partial sums; the gradient goes to the sublayer that made them."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        token: torch.Tensor,
        sublayer: RecordedSublayer,
        reduce: Transport | None,
        spread: Transport,
    ) -> torch.Tensor:
        """None for `reduce` where nothing reads the sum: only its shape is right then."""
        ctx.sublayer, ctx.spread = sublayer, spread
        return y[: len(sublayer.leaf)] if reduce is None else reduce(y)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[None, ...]:
        ctx.sublayer.dy = ctx.spread(dout)
        return None, None, None, None, None
