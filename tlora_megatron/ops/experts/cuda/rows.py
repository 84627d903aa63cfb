"""Rows of adapters on routed experts on Hopper: `s = scaling x M^T` by csrc/expert_rows.cu.

Shapes: Q rows, K columns, W rank rows of the widest slot, R rank columns of the arenas.
"""

from __future__ import annotations

from torch import Tensor

from tlora_megatron.ops.experts.branch import PlacedRows
from tlora_megatron.ops.experts.rank_tables import RankRows, RankTables
from tlora_megatron.ops.experts.triton.products import down as triton_down
from tlora_megatron.ops.experts.triton.tiles import PairTiles
from tlora_megatron.ops.lora.cuda.arguments import ExpertRowsArguments, packer
from tlora_megatron.ops.lora.cuda.calls import device_index, launch

_ROWS = packer(ExpertRowsArguments)
_PIECE = 8
"""Columns of a copy."""


def down(
    x: PlacedRows, rows: RankRows, tables: RankTables, tiles: PairTiles, wide_QR: Tensor
) -> Tensor:
    """Returns `scaling x M^T` `[Q, W]`, as `triton.products.down` does.

    Args:
        x: bf16, K a multiple of 8.
        wide_QR: zeros; gets the same at the rank columns of the arenas.
    """
    if not rows.aligned or rows.span % _PIECE:
        return triton_down(x, rows, tables, tiles, wide_QR)
    values_TK, rows_Q = x
    s_QW = values_TK.new_empty(wide_QR.shape[0], tables.width)
    arguments = _ROWS.pack(  # in the order of `ExpertRowsArguments`
        values_TK.data_ptr(),
        0 if rows_Q is None else rows_Q.data_ptr(),
        tiles.tiles.data_ptr(),
        rows.places_4SW.data_ptr(),
        tables.widths_S.data_ptr(),
        tables.scaling_S.data_ptr(),
        tables.positions.data_ptr(),
        s_QW.data_ptr(),
        wide_QR.data_ptr(),
        values_TK.shape[1],
        len(tiles.tiles),
        tables.slots,
        tables.width,
        wide_QR.shape[1],
        device_index(s_QW),
    )
    launch("expert_rows", arguments, s_QW)
    return s_QW
