"""How s and dS lie for the CUDA kernels: one flat tensor, read and written in two forms."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tlora_megatron.ops.cuda_row_items import rank_columns
from tlora_megatron.ops.plan_tensors import PlanTensors
from tlora_megatron.ops.tiling import RANK_CHUNK, ROW_TILE


class RankForm(NamedTuple):
    """The transposed chunks that the GEMM reads, `[chunk_rows, 256]`, then the same values as rows
    `[num_rows, row_width]`, which the sums over rows read.

    Launches take addresses: views would cost the host as much as the launch.
    """

    chunk_rows: int
    num_rows: int
    row_width: int

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self.chunk_rows * ROW_TILE + self.num_rows * self.row_width

    def rows_address(self, flat: torch.Tensor) -> int:
        """Where the rows begin."""
        return flat.data_ptr() + self.chunk_rows * ROW_TILE * flat.element_size()

    def chunks(self, flat: torch.Tensor) -> torch.Tensor:
        """A view `[chunk_rows, 256]`."""
        return flat[: self.chunk_rows * ROW_TILE].view(self.chunk_rows, ROW_TILE)

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """A view `[num_rows, row_width]`."""
        return flat[self.chunk_rows * ROW_TILE :].view(self.num_rows, self.row_width)


def rank_form(plan: PlanTensors) -> RankForm:
    """The form of a plan's s and dS; the same whatever the segments of as many rows."""
    return plan.cached(RankForm, _form)


def _form(plan: PlanTensors) -> RankForm:
    return RankForm(plan.num_chunks * RANK_CHUNK, plan.num_rows, rank_columns(plan.layout))
