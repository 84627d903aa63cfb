"""Grouped matrix products over runs of rows: one launch for any number of adapters.

The torch path of the multi-adapter linear, on CPU and GPU. Weights are stacked over slots, padded
to the largest rank (zero rows and columns add nothing); the last entry of a stack is the null slot,
all zeros, which padding rows use.

Shapes: T rows, K features in, N features out, S slots + 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tlora_megatron.ops.row_groups import RowGroups


def grouped_linear(x_TK: torch.Tensor, w_SKN: torch.Tensor, rows: RowGroups) -> torch.Tensor:
    """Returns `y[t] = x[t] @ w[slot of t]`, `[T, N]` in the dtype of `x`."""
    if _has_grouped_mm(len(rows.ends), x_TK, w_SKN):
        return F.grouped_mm(x_TK, w_SKN, offs=rows.offsets(x_TK.device))
    y_TN = x_TK.new_empty(x_TK.shape[0], w_SKN.shape[2])
    begin = 0
    for slot, end in enumerate(rows.ends):
        if end > begin:
            torch.mm(x_TK[begin:end], w_SKN[slot], out=y_TN[begin:end])
        begin = end
    return y_TN


def grouped_outer(a_TM: torch.Tensor, b_TN: torch.Tensor, rows: RowGroups) -> torch.Tensor:
    """Returns `out[s] = a[rows of s]^T @ b[rows of s]`, `[S, M, N]`; undefined in empty slots."""
    if _has_grouped_mm(len(rows.ends), a_TM, b_TN):
        return F.grouped_mm(a_TM.t(), b_TN, offs=rows.offsets(a_TM.device))
    out_SMN = a_TM.new_empty(len(rows.ends), a_TM.shape[1], b_TN.shape[1])
    begin = 0
    for slot, end in enumerate(rows.ends):
        if end > begin:
            torch.mm(a_TM[begin:end].t(), b_TN[begin:end], out=out_SMN[slot])
        begin = end
    return out_SMN


def _has_grouped_mm(num_groups: int, *operands: torch.Tensor) -> bool:
    """Whether torch's grouped GEMM takes the operands: rows of whole 16 bytes that begin at one
    and, on CUDA, bf16 and fewer than 1024 groups.

    (For other dtypes on CUDA it has a fallback that waits for the device.)
    """
    x = operands[0]
    aligned = all(
        t.data_ptr() % 16 == 0
        and all(stride == 1 or stride * t.element_size() % 16 == 0 for stride in t.stride())
        for t in operands
    )
    return aligned and (not x.is_cuda or (x.dtype == torch.bfloat16 and num_groups < 1024))
