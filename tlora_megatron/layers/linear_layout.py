"""The split of a linear and its activations over the ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from tlora_megatron.parallel.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    gather_together,
    reduce_scatter_rows,
)


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

    def gather_input(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Returns all rows of the input."""
        return all_gather_rows(x_TK, self.group) if self.gathers_input else x_TK

    def gather_together(self, tensors: Sequence[torch.Tensor]) -> list[Pending]:
        """Starts gathering all ranks' rows of what belongs to the input."""
        return gather_together(tensors, self.group)

    def sum_ranks(self, x: torch.Tensor) -> Pending:
        """Starts summing over the ranks, in place."""
        return all_reduce(x, self.group)

    def reduce_dgrad(self, dx_TK: torch.Tensor) -> Pending:
        """Starts the reduction of dx; gradients of factors are computed while it is under way."""
        if self.gathers_input:
            return reduce_scatter_rows(dx_TK, self.group)
        return all_reduce(dx_TK, self.group if self.reduces_dgrad else None)
