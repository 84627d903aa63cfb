"""Arguments that several launches of the Triton kernels have in common."""

from __future__ import annotations

import torch
import triton

from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.plan_tensors import WORKSPACE_UNIT, PlanTensors, WorkItems
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, ROW_TILE
from tlora_megatron.ops.routing.row_groups import RowGroups


def pairs_of_columns(values: torch.Tensor, first_column: int) -> bool:
    """Returns True if dropout may work on registers of two values (`dropout.triton.drop_zero`)."""
    interpreted: bool = triton.knobs.runtime.interpret
    return not interpreted and values.element_size() == 2 and first_column % 2 == 0


def largest_rank_tile(chunks: int, limit: int) -> int:
    """Rank rows of the largest tile that so many chunks need, a power of two."""
    return min(limit, triton.next_power_of_2(max(chunks, 1) * RANK_CHUNK))


def column_mapping(columns: tuple[OutputColumns, ...], block: int) -> int:
    """How blocks of so many columns lie in the fused output: `rank_product.mapped_columns`."""
    if all(c.is_whole for c in columns):
        return 0
    fits = all(c.width % block == 0 and c.stride % 8 == 0 and c.begin % 8 == 0 for c in columns)
    return 1 if fits else 2


def new_workspace(items: WorkItems, device: torch.device) -> torch.Tensor:
    """Room for an item list's partial sums, fp32."""
    return torch.empty(max(items.workspace, 1) * WORKSPACE_UNIT, device=device)


def new_ranked(like: torch.Tensor, plan: PlanTensors) -> torch.Tensor:
    """Room for s or dS, `[PlanTensors.ranked_rows, ROW_TILE]`; undefined."""
    return like.new_empty(plan.ranked_rows, ROW_TILE)


def row_keys_or(rows: RowGroups, drop: bool, unused: torch.Tensor) -> torch.Tensor:
    """The rows' dropout keys, int32; any tensor where none is read."""
    return rows.row_keys(unused.device) if drop else unused
