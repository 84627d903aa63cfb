"""The input gradient of an FP8 weight on Hopper GPUs, from the codes as forward reads them.

csrc/fp8_dgrad.cuh says how. No second copy of the weight is made, not even for the while.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

import torch

from tlora_megatron.ops.lora.cuda.arguments import DgradArguments, packer
from tlora_megatron.ops.lora.cuda.calls import GemmTile, RankPart, gemm_arguments, launch
from tlora_megatron.ops.quantised.handed_rows import handed_rows
from tlora_megatron.ops.quantised.rows import QuantRows
from tlora_megatron.ops.quantised.weight_codes import WeightCodes

_ARGUMENTS = packer(DgradArguments)


def dgrad_with_ranks(
    dy_TN: torch.Tensor, weight: WeightCodes, rank: RankPart | None
) -> torch.Tensor:
    """Returns `dy W + mask(rank part)`, with dy's codes from who made dy or made here.

    `cuda_products.takes` says for which weights.

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
    weight: WeightCodes,
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
    plain = gemm_arguments(
        dy_rows.codes_TK,
        weight.codes_NK,
        dx_TK,
        GemmTile(256, group),
        False,
        overlaps_previous_kernel,
        None,
        rank,
    )
    block_scales = weight.scales.data_ptr() if weight.kind == "block" else 0
    arguments = _ARGUMENTS.pack(plain, dy_rows.scales.data_ptr(), block_scales)
    launch("fp8_dgrad", arguments, dx_TK)
