"""Products of experts' frozen weights with rows that lie expert by expert.

On GPUs in bfloat16 all experts are one `torch.nn.functional.grouped_mm`, which reads their numbers
of rows on the device. Elsewhere they are a loop, which reads them on the host.

Shapes: E experts, R rows, K features in, N features out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_products(x_RK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Returns `x W_e^T` `[R, N]`, each row by its own expert's weight.

    Args:
        counts_E: int64, rows of each expert; their sum is R.
    """
    if runs_grouped(x_RK):
        return grouped_products(x_RK, weight_ENK.transpose(1, 2), counts_E)
    return looped_products(x_RK, weight_ENK.transpose(1, 2), counts_E)


def expert_dgrads(dy_RN: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Returns `dy W_e` `[R, K]`; see `expert_products`."""
    if runs_grouped(dy_RN):
        return grouped_products(dy_RN, weight_ENK, counts_E)
    return looped_products(dy_RN, weight_ENK, counts_E)


def runs_grouped(x: Tensor) -> bool:
    """True if all experts are one launch."""
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0


def looped_products(x_RK: Tensor, weight_EKN: Tensor, counts_E: Tensor) -> Tensor:
    """The definition: one product an expert; waits for the device."""
    out_RN = x_RK.new_empty(len(x_RK), weight_EKN.shape[2])
    begin = 0
    for expert, count in enumerate(counts_E.tolist()):
        rows = slice(begin, begin + count)
        if count:
            torch.mm(x_RK[rows], weight_EKN[expert], out=out_RN[rows])
        begin += count
    return out_RN


def grouped_products(x_RK: Tensor, weight_EKN: Tensor, counts_E: Tensor) -> Tensor:
    """The same products in one call, without waiting."""
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return F.grouped_mm(x_RK.contiguous(), weight_EKN, offs=ends_E)
