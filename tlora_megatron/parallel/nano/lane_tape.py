"""What a lane keeps on its way through layers, for the way back: see `parallel.nano.lanes`.

A `Tape` holds graphs that autograd has recorded of any layers' code; a `DirectTape` functions that
lead back, of layers that need no autograd. Both are walked back a half layer at a time: `begin`,
then `compute` and `reach` for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge

from tlora_megatron.ops.frozen.frozen_parts import End, Vjp, run_backward

Module = Callable[[torch.Tensor], Any]
Transport = Callable[[torch.Tensor], torch.Tensor]


class WayBack(Protocol):
    """What tapes need of their lane."""

    def spread(self, dx: torch.Tensor) -> torch.Tensor:
        """The way back of a reduction: the gradient of all rows."""

    def compute_again(self, module: Module, x: torch.Tensor) -> torch.Tensor:
        """A compute piece's partial sums, recorded."""


@dataclass(slots=True, eq=False)
class DirectHalf:
    """Attention or an MLP that leads back by two calls; they hold what is saved."""

    compute: Vjp
    """From the gradient of the row-parallel linear's sums to that of the column-parallel one's
    input, not yet summed over the ranks."""
    norm: Vjp
    """From the gradients of the residual stream and of its norm to that of the residual stream
    before the half before has added to it, which is also that of what it has added."""


@dataclass(slots=True, eq=False)
class DirectTape:
    """A lane's pieces from one input of layers to their result, walked back without autograd."""

    halves: list[DirectHalf] = field(default_factory=list)
    norm: Vjp | None = None
    """As `DirectHalf.norm`, behind the last half; None = the residual stream itself is the end."""
    dy: torch.Tensor | None = None
    """On the way back: the gradient of the last half's sums."""

    def begin(self, dout: torch.Tensor, lane: WayBack) -> torch.Tensor:
        """The gradient of the residual stream behind the last half."""
        norm, self.norm = self.norm, None
        return self._spread(dout if norm is None else norm(None, dout), lane)

    def compute(self, lane: WayBack) -> torch.Tensor:
        """The compute piece of the last half: the gradient of its input, before the reduction."""
        dy, self.dy = self.dy, None
        return self.halves[-1].compute(dy)

    def reach(self, dx: torch.Tensor, gradient: torch.Tensor, lane: WayBack) -> torch.Tensor:
        """The elementwise piece before the last half, which comes off; the residual's gradient.

        Args:
            dx: of the norm.
            gradient: of the residual stream, so far.
        """
        return self._spread(self.halves.pop().norm(gradient, dx), lane)

    def _spread(self, gradient: torch.Tensor, lane: WayBack) -> torch.Tensor:
        if self.halves:
            self.dy = lane.spread(gradient)
        return gradient


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
    token: torch.Tensor
    """An input that requires grad for the reductions' nodes: the partial sums themselves would be
    kept alive as a leaf."""
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

    def begin(self, dout: torch.Tensor, lane: WayBack) -> torch.Tensor:
        """As `DirectTape.begin`."""
        assert self.out is not None, "a tape must have ended"
        return self._grad((self.out,), (dout,), self.leaf)

    def compute(self, lane: WayBack) -> torch.Tensor:
        """As `DirectTape.compute`."""
        half = self.halves[-1]
        assert half.dy is not None, "later pieces come first"
        y: Any = half.y
        if half.replay is not None:
            assert half.x_leaf is not None, "what is computed again keeps its input"
            y = lane.compute_again(half.replay, half.x_leaf)
        run_backward((y,), (half.dy,))  # without inputs, or Megatron's checkpoints refuse
        dx = half.dx if half.x_leaf is None else half.x_leaf.grad
        assert dx is not None, "the compute piece must use its input"
        half.x_leaf = half.dx = half.y = half.dy = None
        return dx

    def reach(self, dx: torch.Tensor, gradient: torch.Tensor, lane: WayBack) -> torch.Tensor:
        """As `DirectTape.reach`."""
        half = self.halves.pop()
        if half.is_joint:
            assert half.residual is not None, "a joint cut has a graph"
            return self._grad((half.x, half.residual), (dx, gradient), half.before)
        (dleaf,) = run_backward((half.x,), (dx,), (half.leaf,))
        dleaf = dleaf + gradient
        if half.residual is not None:
            dleaf = self._grad((half.residual,), (dleaf,), half.before)
        return dleaf

    def _grad(
        self, outputs: tuple[End, ...], grads: tuple[torch.Tensor, ...], leaf: torch.Tensor
    ) -> torch.Tensor:
        """Runs an elementwise piece back to its leaf and to the reduction that it begins with."""
        return run_backward(outputs, grads, (leaf, self.token))[0]


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
