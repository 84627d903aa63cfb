"""The multi-adapter linear: a frozen base linear and all adapters' branch, one node of autograd.

`ops.lora.linear_ops` computes the parts; a strategy decides their order, their collectives and what
is saved for backward. There is one for each way in which ranks share the adapters' factors:

    strategy                     its place in a linear
    shardings.FoldStrategy       in the base GEMM: factors lie as the base's weight does
    shardings.SLoraStrategy      in the base GEMM: both factors are sharded
    shardings.BlackBoxStrategy   behind the base, which is called as it is

Over a base in FP8, x of a sequence-parallel linear travels as codes (`QuantisedInput`) wherever the
adapters need no more of x than this rank's rows: codes of a row, and its s, are the same then.

Shapes: T rows, K features in, N features out, as this rank holds them; W rows of x on this rank
before gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.parts import Vjp, frozen_dgrad, frozen_product
from tlora_megatron.ops.lora.linear_ops import Base, BoundLinear, LinearOps, SiteFactors
from tlora_megatron.ops.quantised.rows import QuantRows
from tlora_megatron.ops.quantised.weight import KnownRows, QuantWeight
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    gather_together,
    reduce_scatter_rows,
)
from tlora_megatron.parallel.lanes import Lane


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLayout:
    """The parallelism of one linear; its host module makes it once, when adapters are attached."""

    kind: Literal["column", "row"] = "column"
    """`column`: a rank has some of the output features. `row`: some of the input features."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel ranks; None = nothing is communicated."""
    tp_size: int = 1
    sequence_parallel: bool = False
    """A rank holds a run of the rows, of the input (column) or of the output (row)."""
    reduces_dgrad: bool = False
    """Column only: every rank has the whole input, and its gradient is summed over the group."""
    gathers_input: bool = field(init=False)
    """The input is this rank's rows: gathered forward, its gradient reduce-scattered."""
    scatters_output: bool = field(init=False)
    """The output is this rank's rows of the sum over the group."""

    def __post_init__(self) -> None:
        # Computed once: every linear asks several times a micro-batch.
        is_column = self.kind == "column"
        object.__setattr__(self, "gathers_input", self.sequence_parallel and is_column)
        object.__setattr__(self, "scatters_output", self.sequence_parallel and not is_column)

    def input_window(self, num_rows: int) -> tuple[int, int]:
        """Returns which of the micro-batch's rows the input holds, `begin, end`."""
        return self._own_rows(num_rows) if self.gathers_input else (0, num_rows)

    def output_window(self, num_rows: int) -> tuple[int, int]:
        """Returns which of the micro-batch's rows the output holds, `begin, end`."""
        return self._own_rows(num_rows) if self.scatters_output else (0, num_rows)

    def _own_rows(self, num_rows: int) -> tuple[int, int]:
        size = num_rows // self.tp_size
        begin = dist.get_rank(self.group) * size
        return begin, begin + size

    def gather_input(self, x_TK: Tensor) -> Tensor:
        """Returns all rows of the input."""
        return all_gather_rows(x_TK, self.group) if self.gathers_input else x_TK

    def gather_together(self, tensors: Sequence[Tensor]) -> list[Pending]:
        """Starts gathering all ranks' rows of what belongs to the input."""
        return gather_together(tensors, self.group)

    def sum_ranks(self, x: Tensor) -> Pending:
        """Starts summing over the ranks, in place."""
        return all_reduce(x, self.group)

    def reduce_dgrad(self, dx_TK: Tensor) -> Pending:
        """Starts the reduction of dx; gradients of factors are computed while it is under way."""
        if self.gathers_input:
            return reduce_scatter_rows(dx_TK, self.group)
        return all_reduce(dx_TK, self.group if self.reduces_dgrad else None)


Backward = Callable[..., Tensor | None]
"""`backward(dy_TN, *saved, needs_dx=True)` returns dx `[T, K]`, None if it is not needed, and adds
the factors' gradients to the jobs' slabs."""


class QuantisedInput(NamedTuple):
    """The input of a sequence-parallel linear, of which codes were gathered."""

    x_WK: Tensor
    """This rank's rows, as they were born."""
    rows: QuantRows
    """Codes and scales of all ranks' rows."""
    s: Tensor | None
    """The adapters' s of all rows; None without adapters."""

    def known(self, base: Base) -> KnownRows:
        """Returns the base, which knows the codes of these rows."""
        assert isinstance(base, QuantWeight), "codes come from a base that has them"
        return KnownRows(base.codes_NK, base.scales, self.rows)


class Computed(NamedTuple):
    """The forward result of a strategy."""

    y_TN: Tensor
    saved: tuple[Base | None, ...]
    """Tensors that backward takes beside dy, and a base that is no tensor."""
    backward: Backward


class Strategy:
    """One way to compute the adapters of one linear."""

    def __init__(
        self, ops: LinearOps, index: int, factors: Mapping[int, SiteFactors], layout: LinearLayout
    ) -> None:
        self.layout = layout
        self._ops, self._index, self._factors = ops, index, factors

    @property
    def factors(self) -> SiteFactors | None:
        """The adapters' weights here; None where no job has a target."""
        return self._factors.get(self._index)

    def bind(self, view: MicroBatchView) -> BoundLinear:
        """Returns the linear of these factors over a micro-batch."""
        factors = self.factors
        assert factors is not None, f"site {self._index} must have factors, got none"
        return self._ops.bind(factors, view.rows)


class GemmStrategy(Strategy):
    """Computes a base GEMM together with the adapters' branch."""

    sums_ds = False
    """Forward and backward need no more of a gathered x than this rank's rows: s and dS are summed
    over the ranks instead."""

    def own_s(self, x_WK: Tensor, view: MicroBatchView) -> Tensor:
        """Returns s of this rank's rows, 0 in the others; only where `sums_ds`."""
        return self.bind(view).down(x_WK, self.layout.input_window(view.rows.ends[-1]))

    def forward(
        self,
        x: Tensor | QuantisedInput,
        base: Base,
        bias_N: Tensor | None,
        view: MicroBatchView,
        lane: Lane | None,
    ) -> Computed:
        """Returns `y = x W^T + b + branch(x)`; there must be factors.

        Args:
            x: `[T, K]`, contiguous, gathered already where there is a lane; codes only where
                `takes_codes`.
            lane: of the nano-batch; it also reduces dx.
        """
        raise NotImplementedError


class MultiLoRALinear(torch.autograd.Function):
    """The forward and backward of any strategy, as one node of autograd's graph.

    x must require grad (the embedding's output is made to): otherwise autograd never calls backward
    and the factors get no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base_y: Tensor | None, compute: Callable[[Tensor], Computed]
    ) -> Tensor:
        """Runs `compute` on `[T, K]`.

        Args:
            x: `[..., K]`.
            base_y: a base's output that `compute` adds to; None = it computes the base itself.
        """
        y_TN, saved, ctx.compute_backward = compute(x.contiguous().view(-1, x.shape[-1]))
        ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in saved])
        ctx.bases = [(i, v) for i, v in enumerate(saved) if not isinstance(v, Tensor)]
        ctx.x_shape, ctx.has_base = x.shape, base_y is not None
        return y_TN.view(-1, *x.shape[1:-1], y_TN.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd expands a sum's gradient from one element.
        dy_TN = dy.contiguous().view(-1, dy.shape[-1])
        needs_dx, saved = ctx.needs_input_grad[0], list(ctx.saved_tensors)
        for index, base in ctx.bases:
            saved[index] = base
        dx_TK = ctx.compute_backward(dy_TN, *saved, needs_dx=needs_dx)
        dx = None if dx_TK is None else dx_TK.view(ctx.x_shape)
        return dx, dy if ctx.has_base else None, None


def computes_base(strategy: GemmStrategy, view: MicroBatchView) -> bool:
    """True if the host's own linear must not run.

    Whether a linear has factors follows from the jobs beside one: where a job's bits must not
    depend on them, its GEMM is the same with and without.
    """
    return strategy.factors is not None or view.exactness is not None


def multi_lora_linear(
    x: Tensor,
    base: Base,
    bias_N: Tensor | None,
    strategy: GemmStrategy,
    view: MicroBatchView,
    lane: Lane | None = None,
) -> Tensor:
    """Returns `[..., N]` of x `[..., K]`, differentiable in x; without factors the base alone."""
    return MultiLoRALinear.apply(
        x, None, lambda x_TK: _compute(x_TK, base, bias_N, strategy, view, lane)
    )


def frozen_linear(x: Tensor, base: Base, bias_N: Tensor | None, layout: LinearLayout) -> Tensor:
    """Returns `[..., N]` of x `[..., K]` without adapters, differentiable in x."""
    return MultiLoRALinear.apply(x, None, lambda x_TK: _frozen(x_TK, base, bias_N, layout))


def multi_lora_linear_vjp(
    x: Tensor | QuantisedInput,
    base: Base,
    bias_N: Tensor | None,
    strategy: GemmStrategy,
    view: MicroBatchView,
    lane: Lane | None = None,
) -> tuple[Tensor, Vjp]:
    """Returns y `[T, N]` and the way back as a function; without factors it is the base alone.

    Args:
        x: `[T, K]`, or its codes where `gather_codes` has given any.
    """
    return with_vjp(_compute(x, base, bias_N, strategy, view, lane))


def _compute(
    x: Tensor | QuantisedInput,
    base: Base,
    bias_N: Tensor | None,
    strategy: GemmStrategy,
    view: MicroBatchView,
    lane: Lane | None,
) -> Computed:
    if strategy.factors is None:
        return _frozen(x, base, bias_N, strategy.layout, lane, view.exactness)
    if lane is None and isinstance(x, Tensor):
        x = gather_codes(x, base, strategy, view, strategy.layout) or x
    return strategy.forward(x, base, bias_N, view, lane)


def takes_codes(strategy: GemmStrategy, base: Base) -> bool:
    """True if a linear's input travels as codes."""
    if not strategy.layout.gathers_input or not isinstance(base, QuantWeight):
        return False
    return strategy.factors is None or strategy.sums_ds


def gather_codes(
    x_WK: Tensor,
    base: Base,
    strategy: GemmStrategy,
    view: MicroBatchView,
    transport: LinearLayout | Lane,
) -> QuantisedInput | None:
    """Returns codes of all ranks' rows, and s; None where not `takes_codes`."""
    if not takes_codes(strategy, base):
        return None
    own_s = None if strategy.factors is None else partial(strategy.own_s, x_WK, view)
    return _gather(x_WK, base, transport, own_s)


def _gather(
    x_WK: Tensor,
    base: Base,
    transport: LinearLayout | Lane,
    own_s: Callable[[], Tensor] | None = None,
) -> QuantisedInput:
    assert isinstance(base, QuantWeight), "others have no codes"
    own, s = base.rows_of(x_WK), None
    codes, scales = transport.gather_together([own.codes_TK, own.scales])
    if own_s is not None:
        s = own_s()  # while codes travel
        # In the rows of others there are zeros: a sum of one value and zeros has its bits.
        s = transport.sum_ranks(s).wait() if s.numel() else s
    return QuantisedInput(x_WK, QuantRows(codes.wait(), scales.wait()), s)


def with_vjp(computed: Computed) -> tuple[Tensor, Vjp]:
    """Returns a strategy's result, and the way back as a function that holds what is saved."""
    y_TN, saved, backward = computed
    return y_TN, lambda dy_TN: backward(dy_TN, *saved)


def _frozen(
    x: Tensor | QuantisedInput,
    base: Base,
    bias_N: Tensor | None,
    layout: LinearLayout,
    lane: Lane | None = None,
    exactness: Exactness | None = None,
) -> Computed:
    """Returns y `[T, N]` without adapters, and saves nothing; see `GemmStrategy.forward`."""
    if lane is not None:
        lane.take_local()  # nobody needs it
    elif isinstance(x, Tensor):
        gathers_codes = layout.gathers_input and isinstance(base, QuantWeight)
        x = _gather(x, base, layout) if gathers_codes else layout.gather_input(x)
    rows, known = (x, base) if isinstance(x, Tensor) else (x.x_WK, x.known(base))
    y_TN = frozen_product(rows, known, bias_N, exactness)

    def backward(dy_TN: Tensor, *, needs_dx: bool = True) -> Tensor | None:
        if not needs_dx:
            return None
        dx_TK = frozen_dgrad(dy_TN, base, exactness)
        return dx_TK if lane is not None else layout.reduce_dgrad(dx_TK).wait()

    return Computed(y_TN, (), backward)
