"""The frozen weight of a linear in FP8, the definition of its products, and the rows that it meets.

    y[t,n]  = sx[t] * sw[n] * sum_k cx[t,k] * cw[n,k]            a scale for each output channel
    dx[t,k] = sd[t] * sum_n cd[t,n] * cw[n,k]                    where cd, sd are of dy * sw
    y[t,n]  = sum_g sx[t,g] * sw[n/128,g] * sum_{k in g} cx[t,k] * cw[n,k]      scales of blocks
    dx[t,k] = sd[t] * sum_g sw[g,k/128] * sum_{n in g} cd[t,n] * cw[n,k]

Codes are multiples of 2^-9 up to 448, so a sum of up to 2^17 products of theirs is exact in fp64:
the innermost sums have no rounding and no order. The rest is computed elementwise in fp32, or fp64
if asked for. So a row of a product depends on that row and the weight alone, to the bit.

Under sequence parallelism a linear has its own rows of x, and the codes of all ranks' rows: the
product is of those.

Shapes: T rows, K features in, N features out, G groups of 128, W of the rows
on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.quantised.rows import (
    GROUP,
    QuantRows,
    decode,
    encode_rows,
    hand_rows,
)
from tlora_megatron.ops.quantised.weight_codes import WeightCodes

if TYPE_CHECKING:
    from tlora_megatron.ops.lora.cuda_calls import RankPart


def forward_product(
    rows: QuantRows, codes_NK: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns y `[T, N]` in fp32, or in fp64 where that is `dtype`.

    Args:
        rows: of x; with groups where the scales are of blocks.
        scales: fp32 `[N]`, or `[ceil(N / GROUP), ceil(K / GROUP)]`.
        dtype: of x as it was before it was quantised.
    """
    wide = _wide(dtype)
    x_TK, w_KN = decode(rows.codes_TK, torch.float64), decode(codes_NK, torch.float64).t()
    row_scales, scales = rows.scales.to(wide), scales.to(wide)
    if scales.dim() == 1:
        return (x_TK @ w_KN).to(wide) * (row_scales[:, None] * scales)
    y_TN = x_TK.new_zeros(len(x_TK), w_KN.shape[1], dtype=wide)
    for index, span in _groups(len(w_KN)):
        scales_N = _spread(scales[:, index], w_KN.shape[1])
        part_TN = (x_TK[:, span] @ w_KN[span]).to(wide)
        y_TN += part_TN * (row_scales[:, index, None] * scales_N)
    return y_TN


def input_gradient(rows: QuantRows, codes_NK: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns dx `[T, K]`; see `forward_product`.

    Args:
        rows: of dy, with one scale a row; multiplied with channels' scales before it was quantised.
    """
    wide = _wide(dtype)
    dy_TN, w_NK = decode(rows.codes_TK, torch.float64), decode(codes_NK, torch.float64)
    row_scales, scales = rows.scales.to(wide)[:, None], scales.to(wide)
    if scales.dim() == 1:
        return (dy_TN @ w_NK).to(wide) * row_scales
    dx_TK = dy_TN.new_zeros(len(dy_TN), w_NK.shape[1], dtype=wide)
    for index, span in _groups(len(w_NK)):
        part_TK = (dy_TN[:, span] @ w_NK[span]).to(wide)
        dx_TK += part_TK * _spread(scales[index], w_NK.shape[1])
    return dx_TK * row_scales


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _groups(size: int) -> Iterator[tuple[int, slice]]:
    for index, begin in enumerate(range(0, size, GROUP)):
        yield index, slice(begin, min(begin + GROUP, size))


def _spread(scales_G: Tensor, size: int) -> Tensor:
    """Repeats the scales of groups for each of their members."""
    return scales_G.repeat_interleave(GROUP)[:size]


@dataclass(frozen=True, slots=True, eq=False)
class QuantWeight(WeightCodes):
    """A weight in FP8 that computes its products by the kernels at hand; a `FrozenBase`."""

    def takes_ranks(self, x: Tensor) -> bool:
        """True if Hopper's GEMM of codes computes products of rows like x, adapters included."""
        if not x.is_cuda:
            return False
        # Not at the top: on machines without a GPU nothing of it is needed.
        from tlora_megatron.ops.quantised.cuda import takes

        return takes(x, self)

    def prepare(self, x_TK: Tensor) -> None:
        """Leaves the codes of x on it, for `ranked_product` to take."""
        if not x_TK.is_inference():
            hand_rows(x_TK, self.rows_of(x_TK))

    def ranked_product(self, x_TK: Tensor, bias_N: Tensor | None, rank: RankPart | None) -> Tensor:
        """Returns `x W^T + b + rank part` `[T, N]`; if `takes_ranks`."""
        from tlora_megatron.ops.quantised.cuda import product

        return product(x_TK, self, bias_N, rank)

    def ranked_dgrad(self, dy_TN: Tensor, rank: RankPart | None) -> Tensor:
        """Returns `dy W + mask(rank part)` `[T, K]`; if `takes_ranks`."""
        from tlora_megatron.ops.quantised.cuda import dgrad_with_ranks

        return dgrad_with_ranks(dy_TN, self, rank)

    def forward(self, x_TK: Tensor, onto_TN: Tensor | None = None) -> Tensor:
        """Returns `x W^T` `[T, N]`; added to `onto_TN`, in place, where there is one."""
        if onto_TN is None and self.takes_ranks(x_TK):
            return self.ranked_product(x_TK, None, None)
        rows, dtype = self.rows_of(x_TK), x_TK.dtype
        if _runs_kernels(rows.codes_TK, dtype):
            # Not at the top: triton is only there on machines with a GPU.
            from tlora_megatron.ops.quantised.triton_products import launch_forward

            return launch_forward(rows, self.codes_NK, self.scales, dtype, onto_TN)
        y_TN = forward_product(rows, self.codes_NK, self.scales, dtype)
        return _rounded(y_TN, dtype, onto_TN)

    def dgrad(self, dy_TN: Tensor, onto_TK: Tensor | None = None) -> Tensor:
        """Returns `dy W` `[T, K]`; added to `onto_TK`, in place, where there is one."""
        if onto_TK is None and self.takes_ranks(dy_TN):
            return self.ranked_dgrad(dy_TN, None)
        rows = self.gradient_rows_of(dy_TN)
        if _runs_kernels(dy_TN, dy_TN.dtype):
            from tlora_megatron.ops.quantised.triton_products import launch_input_gradient

            return launch_input_gradient(rows, self.codes_NK, self.scales, dy_TN.dtype, onto_TK)
        dx_TK = input_gradient(rows, self.codes_NK, self.scales, dy_TN.dtype)
        return _rounded(dx_TK, dy_TN.dtype, onto_TK)


def encode_weight(w_NK: Tensor) -> QuantWeight:
    """Quantises a weight with a scale for each output channel.

    Args:
        w_NK: with whole rows: a part of them, as tensor parallelism cuts row-parallel linears,
            would get other scales.
    """
    rows = encode_rows(w_NK)
    return QuantWeight(rows.codes_TK, rows.scales)


def _runs_kernels(x: Tensor, dtype: torch.dtype) -> bool:
    """Returns True for rows on GPUs, unless their products are to be in fp64."""
    return runs_triton(x) and dtype != torch.float64


def _rounded(wide: Tensor, dtype: torch.dtype, onto: Tensor | None) -> Tensor:
    return wide.to(dtype) if onto is None else onto.copy_(wide + onto)


@dataclass(frozen=True, slots=True, eq=False)
class KnownRows(QuantWeight):
    """A weight whose forward product is of given rows: of its x dtype and device count alone."""

    rows: QuantRows
    """Those of x, as the weight's `rows_of` makes them."""

    def rows_of(self, x_WK: Tensor) -> QuantRows:
        return self.rows

    def prepare(self, x_WK: Tensor) -> None:
        """Does nothing: the codes are there."""

    def ranked_product(self, x_WK: Tensor, bias_N: Tensor | None, rank: RankPart | None) -> Tensor:
        from tlora_megatron.ops.quantised.cuda import product_of

        return product_of(self.rows, self, x_WK.dtype, bias_N, rank)
