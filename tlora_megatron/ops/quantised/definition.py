"""Products with quantised weights, by their definition: what all kernels are held against.

    y[t,n]  = sx[t] * sw[n] * sum_k cx[t,k] * cw[n,k]            a scale for each output channel
    dx[t,k] = sd[t] * sum_n cd[t,n] * cw[n,k]                    where cd, sd are of dy * sw
    y[t,n]  = sum_g sx[t,g] * sw[n/128,g] * sum_{k in g} cx[t,k] * cw[n,k]      scales of blocks
    dx[t,k] = sd[t] * sum_g sw[g,k/128] * sum_{n in g} cd[t,n] * cw[n,k]

Codes are multiples of 2^-9 up to 448, so a sum of up to 2^17 products of theirs is exact in fp64:
the innermost sums have no rounding and no order. The rest is computed elementwise in fp32, or fp64
if asked for. So a row of a product depends on that row and the weight alone, to the bit.

Shapes: T rows, K features in, N features out, G groups of 128.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tlora_megatron.ops.quantised.codes import decode
from tlora_megatron.ops.quantised.rows import GROUP, QuantRows


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
