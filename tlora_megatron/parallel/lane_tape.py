"""What a lane keeps on its way through layers, for the way back: see `parallel.lanes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

Module = Callable[[torch.Tensor], Any]
Transport = Callable[[torch.Tensor], torch.Tensor]
End = torch.Tensor | GradientEdge
"""Where a piece ends: a tensor whose memory is needed anyway, or what leads back from it alone."""


@dataclass(slots=True, eq=False)
class Half:
    """What backward needs of attention or an MLP, and of the elementwise piece that leads to it."""

    x: End
    """The column-parallel linear's input, before it is gathered."""
    residual: torch.Tensor | None
    """The residual stream as the elementwise piece ends; None where it is what that began with."""
    is_joint: bool
    """x and the residual end the same graph; else x comes of `leaf`."""
    leaf: torch.Tensor
    """The residual stream, detached: what later pieces begin with."""
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
    """A small sum over the ranks that gradients of factors wait for."""

    part: torch.Tensor
    finish: Callable[[torch.Tensor], None]
    total: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Tape:
    """A lane's pieces from one input of layers to their result."""

    entry: torch.Tensor
    num_read: int | None
    """Reductions whose results are read; None = all."""
    halves: list[Half] = field(default_factory=list)
    out: GradientEdge | None = None

    @property
    def is_read(self) -> bool:
        """Whether anything reads the reduction of the half under way."""
        return self.num_read is None or len(self.halves) <= self.num_read

    @property
    def leaf(self) -> torch.Tensor:
        """What the piece under way began with."""
        return self.halves[-1].leaf if self.halves else self.entry


def run_backward(
    outputs: tuple[End, ...],
    grads: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...] = (),
) -> Any:
    """`torch.autograd.grad`, or `backward` without inputs, and none of their checks, which took 18
    of the 76 us that a half layer's cuts cost the host, there and back (a server CPU's core)."""
    return Variable._execution_engine.run_backward(
        outputs, grads, False, False, inputs, allow_unreachable=True, accumulate_grad=not inputs
    )


class Gathered(torch.autograd.Function):
    """A compute piece's input, which is kept by none that does not save it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, half: Half) -> torch.Tensor:
        ctx.half = half
        return x

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, ...]:
        ctx.half.dx = dx
        return None, None, None


class Reduced(torch.autograd.Function):
    """The reduction of partial sums; its gradient goes to the half that they come of."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        token: torch.Tensor,
        half: Half,
        reduce: Transport | None,
        spread: Transport,
    ) -> torch.Tensor:
        """None for `reduce` where nothing reads the sum: only its shape is right then."""
        ctx.half, ctx.spread = half, spread
        return y[: len(half.leaf)] if reduce is None else reduce(y)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[None, ...]:
        ctx.half.dy = ctx.spread(dout)
        return None, None, None, None, None
