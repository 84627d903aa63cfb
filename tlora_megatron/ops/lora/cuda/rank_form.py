"""The layout of s and dS for the CUDA kernels: one flat tensor, read and written in two forms."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tlora_megatron.ops.lora.cuda.work_items import rank_columns
from tlora_megatron.ops.lora.plan_tensors import PlanTensors
from tlora_megatron.ops.lora.rank_places import Elements, PlacesBuilder, chunk_form, first_rows
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, ROW_TILE
from tlora_megatron.ops.routing.row_groups import RowGroups


class RankForm(NamedTuple):
    """Sizes of a flat s or dS, which holds every value twice: in chunks, then in rows.

    The GEMM reads the transposed chunks, `[chunk_rows, 256]`; the sums over rows read the rows,
    `[num_rows, row_width]`.

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
        """Address of the first row."""
        return flat.data_ptr() + self.chunk_rows * ROW_TILE * flat.element_size()

    def chunks(self, flat: torch.Tensor) -> torch.Tensor:
        """A view `[chunk_rows, 256]`."""
        return flat[: self.chunk_rows * ROW_TILE].view(self.chunk_rows, ROW_TILE)

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """A view `[num_rows, row_width]`."""
        return flat[self.chunk_rows * ROW_TILE :].view(self.num_rows, self.row_width)


def form_places(rows: RowGroups, plan: PlanTensors) -> PlacesBuilder:
    """Returns the builder of places in a flat s or dS, among its rows and in its chunks."""

    def build(found: Elements) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...]]:
        form = rank_form(plan)
        row = first_rows(rows, plan.layout, plan.device)[found.slot] + found.row
        in_rows = form.chunk_rows * ROW_TILE + row * form.row_width + found.place
        return (form.numel,), (in_rows, chunk_form(rows, plan, found))

    return build


def rank_form(plan: PlanTensors) -> RankForm:
    """Returns the form of a plan's s and dS, equal for all segments of as many rows."""
    return plan.cached(RankForm, _form)


def _form(plan: PlanTensors) -> RankForm:
    return RankForm(plan.num_chunks * RANK_CHUNK, plan.num_rows, rank_columns(plan.layout))
