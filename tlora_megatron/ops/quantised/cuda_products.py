"""Products with FP8 weights on Hopper GPUs, adapters included: one GEMM of codes a direction.

csrc/fp8_gemm.cuh says what it computes. The input gradient goes through a transposed copy of the
weight's codes, which lives for the one product (csrc/transpose_codes.cu): the tensor cores read 8
bits along the sum only. A row's bits depend on that row and the weight alone, not on the tiles.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tlora_megatron.ops.lora.cuda.arguments import Fp8GemmArguments, TransposeArguments, packer
from tlora_megatron.ops.lora.cuda.calls import (
    GemmTile,
    RankPart,
    device_index,
    gemm_arguments,
    launch,
    multiprocessors,
)
from tlora_megatron.ops.lora.cuda.operands import fit_gemm, gemm_tile
from tlora_megatron.ops.lora.kernel_choice import kernel_choice
from tlora_megatron.ops.quantised.cuda_dgrad import dgrad_with_ranks, fits_fp8_dgrad
from tlora_megatron.ops.quantised.handed_rows import handed_rows
from tlora_megatron.ops.quantised.rows import QuantRows

if TYPE_CHECKING:
    from tlora_megatron.ops.quantised.weight import QuantWeight

_SPEEDS = ((256, 1.0), (192, 0.99), (128, 0.88))
"""Widths of tiles and the share of the widest's speed that each reaches on an H200."""
_BLOCK_SPEEDS = tuple(pair for pair in _SPEEDS if pair[0] != 192)
"""A tile of scales of blocks must be whole blocks wide."""
_GEMM, _TRANSPOSE = map(packer, (Fp8GemmArguments, TransposeArguments))


class WeightScales(NamedTuple):
    """How the GEMM finds scales: null or channels', or of blocks with the steps between them."""

    address: int = 0
    is_block: bool = False
    row_stride: int = 1
    """Elements from one row's scale to the next's."""
    row_group_stride: int = 0
    """Elements from a row's scale of 128 columns to that of the next 128."""
    column_stride: int = 0
    """Elements from the scale of 128 output columns to that of the next."""
    group_stride: int = 0
    """Elements from the scale of 128 terms of the sum to that of the next."""


def takes(x: Tensor, weight: QuantWeight) -> bool:
    """True if these kernels compute the products of x, or of a gradient, with a weight."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and not any(size % 16 for size in weight.shape)
        and fit_gemm(*weight.shape)
        and _kernels_are_ours(x.device, x.dtype)
    )


def product(
    x_TK: Tensor, weight: QuantWeight, bias_N: Tensor | None, rank: RankPart | None
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
    weight: QuantWeight,
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
        weight.codes_NK,
        forward_scales(weight),
        out_TN,
        tile_of(out_TN, weight),
        overlaps_previous_kernel=overlaps,
        bias_N=bias_N,
        rank=rank,
    )
    return out_TN


def input_gradient(dy_TN: Tensor, weight: QuantWeight, rank: RankPart | None) -> Tensor:
    """Returns `dy W + mask(rank part)`, with dy's codes from who made dy or made here."""
    if fits_fp8_dgrad(weight):
        return dgrad_with_ranks(dy_TN, weight, rank)
    rows = weight.gradient_rows_of(dy_TN)
    codes_KN = transposed(weight.codes_NK)
    out_TK = dy_TN.new_empty(len(dy_TN), weight.shape[1])
    tile = tile_of(out_TK, weight)
    fp8_gemm(rows, codes_KN, gradient_scales(weight), out_TK, tile, rank=rank)
    return out_TK


def transposed(codes: Tensor) -> Tensor:
    """Returns a transposed copy of codes, both of whose sizes are multiples of 16.

    Its memory belongs to the current stream, so streams never share a copy.
    """
    copy = codes.new_empty(codes.shape[1], codes.shape[0])
    arguments = (codes.data_ptr(), copy.data_ptr(), *codes.shape, device_index(codes))
    launch("transpose", _TRANSPOSE.pack(*arguments), codes)
    return copy


def forward_scales(weight: QuantWeight) -> WeightScales:
    """Returns the scales of `x W^T`."""
    if weight.kind == "channel":
        return WeightScales(weight.scales.data_ptr())
    groups = weight.scales.shape[1]
    return WeightScales(weight.scales.data_ptr(), True, groups, 1, groups, 1)


def gradient_scales(weight: QuantWeight) -> WeightScales:
    """Returns the scales of `dy W`: those of channels are in dy's codes already."""
    if weight.kind == "channel":
        return WeightScales()
    return WeightScales(weight.scales.data_ptr(), True, 1, 0, 1, weight.scales.shape[1])


def fp8_gemm(
    rows: QuantRows,
    codes: Tensor,
    scales: WeightScales,
    out: Tensor,
    tile: GemmTile,
    *,
    overlaps_previous_kernel: bool = False,
    bias_N: Tensor | None = None,
    rank: RankPart | None = None,
) -> None:
    """`out = rows codes^T`, scaled, `+ bias + mask(rank part)`.

    Args:
        codes: `[columns of out, columns of rows]`.
        overlaps_previous_kernel: start before the previous kernel has ended. Everything but the
            rank part's flat tensor must have been written before that kernel began.
    """
    plain = gemm_arguments(
        rows.codes_TK, codes, out, tile, True, overlaps_previous_kernel, bias_N, rank
    )
    address, is_block, *strides = scales
    arguments = _GEMM.pack(  # in the order of `Fp8GemmArguments`
        plain, rows.scales.data_ptr(), address, *strides, is_block
    )
    launch("fp8_gemm", arguments, out)


def tile_of(out: Tensor, weight: QuantWeight) -> GemmTile:
    """Returns how the GEMM of an output is divided; its bits do not depend on it."""
    speeds = _SPEEDS if weight.kind == "channel" else _BLOCK_SPEEDS
    return gemm_tile(len(out), out.shape[1], multiprocessors(out.device) // 2, speeds)


@functools.cache
def _kernels_are_ours(device: torch.device, dtype: torch.dtype) -> bool:
    return kernel_choice(device, dtype).name == "cuda"
