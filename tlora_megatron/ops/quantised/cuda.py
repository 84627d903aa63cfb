"""Products with FP8 weights on Hopper GPUs, adapters included, and their input gradient.

csrc/fp8_gemm.cuh says what it computes, csrc/fp8_dgrad.cuh how the input gradient comes without a
second copy of the weight. A row's bits depend on that row and the weight alone, not on the tiles.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlora_megatron.ops.lora.cuda_arguments import (
    DgradArguments,
    Fp8GemmArguments,
    GemmTile,
    fit_gemm,
    gemm_tile,
    packer,
)
from tlora_megatron.ops.lora.cuda_calls import RankPart, gemm_arguments, launch, multiprocessors
from tlora_megatron.ops.lora.kernel_choice import runs_cuda
from tlora_megatron.ops.quantised.rows import QuantRows, handed_rows
from tlora_megatron.ops.quantised.weight_codes import WeightCodes

_SPEEDS = ((256, 1.0), (192, 0.99), (128, 0.88))
"""Widths of tiles and the share of the widest's speed that each reaches on an H200."""
_BLOCK_SPEEDS = tuple(pair for pair in _SPEEDS if pair[0] != 192)
"""A tile of scales of blocks must be whole blocks wide."""
_GEMM, _DGRAD = packer(Fp8GemmArguments), packer(DgradArguments)


def takes(x: Tensor, weight: WeightCodes) -> bool:
    """True if our kernels compute the products of x, or of a gradient, with a weight."""
    return (
        x.dtype == torch.bfloat16
        and not any(size % 16 for size in weight.shape)
        and fit_gemm(*weight.shape)
        and runs_cuda(x)
    )


def product(
    x_TK: Tensor, weight: WeightCodes, bias_N: Tensor | None, rank: RankPart | None
) -> Tensor:
    """Returns `x W^T + b + rank part`, with x's codes from who made x or made here.

    Args:
        rank: of an s that the kernel before has made; codes that x brings are older.
    """
    handed = handed_rows(x_TK, weight.group)
    rows = weight.rows_of(x_TK) if handed is None else handed
    # What is made here is the kernel before's.
    return product_of(rows, weight, x_TK.dtype, bias_N, rank, overlaps=handed is not None)


def product_of(
    rows: QuantRows,
    weight: WeightCodes,
    dtype: torch.dtype,
    bias_N: Tensor | None,
    rank: RankPart | None,
    *,
    overlaps: bool = False,
) -> Tensor:
    """Returns `x W^T + b + rank part` of rows that are there already.

    Args:
        dtype: of x.
        overlaps: start before the previous kernel has ended, as `fp8_gemm` takes it.
    """
    out_TN = torch.empty(
        len(rows.codes_TK), weight.num_columns, dtype=dtype, device=rows.codes_TK.device
    )
    fp8_gemm(
        rows,
        weight,
        out_TN,
        tile_of(out_TN, weight),
        overlaps_previous_kernel=overlaps,
        bias_N=bias_N,
        rank=rank,
    )
    return out_TN


def fp8_gemm(
    rows: QuantRows,
    weight: WeightCodes,
    out_TN: Tensor,
    tile: GemmTile,
    *,
    overlaps_previous_kernel: bool = False,
    bias_N: Tensor | None = None,
    rank: RankPart | None = None,
) -> None:
    """`out = rows W^T + bias + rank part`.

    Args:
        rows: as the weight's `rows_of` makes them.
        out_TN: bf16, written.
        overlaps_previous_kernel: start before the previous kernel has ended. Everything but the
            rank part's flat tensor must have been written before that kernel began.
        rank: of an s, which no dropout masks any more.
    """
    plain = gemm_arguments(
        rows.codes_TK, weight.codes_NK, out_TN, tile, True, overlaps_previous_kernel, bias_N, rank
    )
    addresses = rows.scales.data_ptr(), weight.scales.data_ptr()
    launch("fp8_gemm", _GEMM.pack(plain, *addresses, weight.kind == "block"), out_TN)


def tile_of(out_TN: Tensor, weight: WeightCodes) -> GemmTile:
    """Returns how the GEMM of an output is divided; its bits do not depend on it."""
    speeds = _SPEEDS if weight.kind == "channel" else _BLOCK_SPEEDS
    return gemm_tile(
        max(1, len(out_TN)), out_TN.shape[1], multiprocessors(out_TN.device) // 2, speeds
    )


def dgrad_with_ranks(dy_TN: Tensor, weight: WeightCodes, rank: RankPart | None) -> Tensor:
    """Returns `dy W + mask(rank part)`, with dy's codes from who made dy or made here.

    `takes` says for which weights.

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
    dx_TK: Tensor,
    *,
    rank: RankPart | None = None,
    overlaps_previous_kernel: bool = False,
) -> None:
    """`dx = dy W + mask(rank part)`.

    Args:
        dy_rows: with one scale a row; for a weight of kind "channel", of dy times its scales.
        dx_TK: bf16, written.
        rank: dS with the arena of `lora_a`.
        overlaps_previous_kernel: start before the previous kernel has ended. Everything but dS
            must have been written before that kernel began.
    """
    plain = gemm_arguments(
        dy_rows.codes_TK,
        weight.codes_NK,
        dx_TK,
        GemmTile(256),
        False,
        overlaps_previous_kernel,
        None,
        rank,
    )
    block_scales = weight.scales.data_ptr() if weight.kind == "block" else 0
    arguments = _DGRAD.pack(plain, dy_rows.scales.data_ptr(), block_scales)
    launch("fp8_dgrad", arguments, dx_TK)
