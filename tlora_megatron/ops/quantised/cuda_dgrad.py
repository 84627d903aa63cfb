"""The input gradient of an FP8 weight on Hopper GPUs, from the codes as forward reads them.

csrc/fp8_dgrad.cuh says how. No second copy of the weight is made, not even for the while.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tlora_megatron.ops.lora.cuda.arguments import DgradArguments, packer
from tlora_megatron.ops.lora.cuda.calls import (
    RankPart,
    device_index,
    launch,
    mask_fields,
    multiprocessors,
)
from tlora_megatron.ops.quantised.handed_rows import handed_rows
from tlora_megatron.ops.quantised.rows import QuantRows

if TYPE_CHECKING:
    from tlora_megatron.ops.quantised.weight import QuantWeight

FROM_REGISTERS = True
"""False leaves the input gradient to kernels that transpose the weight first."""
_ARGUMENTS = packer(DgradArguments)
_SIZE_STEP = 16
"""Bytes: rows of codes must begin at multiples of it."""


def fits_fp8_dgrad(weight: QuantWeight) -> bool:
    """True if the kernel takes a weight of these sizes, and is to be used."""
    return FROM_REGISTERS and not any(size % _SIZE_STEP for size in weight.shape)


def dgrad_with_ranks(
    dy_TN: torch.Tensor, weight: QuantWeight, rank: RankPart | None
) -> torch.Tensor:
    """Returns `dy W + mask(rank part)`, with dy's codes from who made dy or made here.

    Args:
        rank: of a dS that the kernel before has made.
    """
    dy_TN = dy_TN.contiguous()
    handed = handed_rows(dy_TN, None, weight.fold_N)
    dx_TK = dy_TN.new_empty(len(dy_TN), weight.shape[1])
    fp8_dgrad(
        weight.gradient_rows_of(dy_TN) if handed is None else handed,
        weight,
        dx_TK,
        rank=rank,
        overlaps_previous_kernel=handed is not None,  # what is made here is the previous kernel's
    )
    return dx_TK


def fp8_dgrad(
    dy_rows: QuantRows,
    weight: QuantWeight,
    dx_TK: torch.Tensor,
    *,
    rank: RankPart | None = None,
    overlaps_previous_kernel: bool = False,
    group: int = 8,
) -> None:
    """`dx = dy W + mask(rank part)`.

    Args:
        dy_rows: with one scale a row; for a weight of kind "channel", of dy times its scales.
        dx_TK: bf16, written.
        rank: dS with the arena of `lora_a`.
        overlaps_previous_kernel: start before the previous kernel has ended. Everything but dS
            must have been written before that kernel began.
        group: row tiles whose column tiles are computed one after another.
    """
    ext = factor = tile_chunks = chunk_rows = 0
    ext_rows = factor_rows = num_targets = 0
    mask = mask_fields(None if rank is None else rank.dropout)
    if rank is not None:
        (lora_a,) = rank.factors.arenas
        ext, factor = rank.flat.data_ptr(), lora_a.data_ptr()
        ext_rows, factor_rows, num_targets = rank.form.chunk_rows, len(lora_a), rank.num_targets
        tile_chunks, chunk_rows = rank.tile_chunks.data_ptr(), rank.chunk_rows.data_ptr()
    arguments = _ARGUMENTS.pack(  # in the order of `DgradArguments`
        dy_rows.codes_TK.data_ptr(),
        weight.codes_NK.data_ptr(),
        dy_rows.scales.data_ptr(),
        weight.scales.data_ptr() if weight.kind == "block" else 0,
        ext,
        factor,
        dx_TK.data_ptr(),
        tile_chunks,
        chunk_rows,
        mask.row_keys,
        mask.row_slots,
        mask.probability,
        dx_TK.shape[0],
        dx_TK.shape[1],
        weight.num_columns,
        ext_rows,
        factor_rows,
        num_targets,
        mask.key,
        mask.first_column,
        group,
        multiprocessors(dx_TK.device) // 2 * 2,
        overlaps_previous_kernel,
        device_index(dx_TK),
    )
    launch("fp8_dgrad", arguments, dx_TK)
