"""Products with a frozen weight where no adapter is.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

import functools

import torch

from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.lora.kernel_choice import kernel_choice
from tlora_megatron.ops.lora.linear_ops import Base, base_dgrad, base_product


def frozen_product(
    x_TK: torch.Tensor, base: Base, bias_N: torch.Tensor | None, exactness: Exactness | None
) -> torch.Tensor:
    """Returns `x W^T + b`."""
    if exactness is None or not isinstance(base, torch.Tensor) or not has_own_gemm(x_TK, base):
        return base_product(base, x_TK, bias_N)
    return _own_gemm(x_TK, base, exactness, bias_N, transposed=True)


def frozen_dgrad(dy_TN: torch.Tensor, base: Base, exactness: Exactness | None) -> torch.Tensor:
    """Returns `dy W`."""
    if exactness is None or not isinstance(base, torch.Tensor) or not has_own_gemm(dy_TN, base):
        return base_dgrad(base, dy_TN)
    return _own_gemm(dy_TN, base, exactness, None, transposed=False)


def has_own_gemm(x: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """True if the GEMM of the adapted linears can compute a product: cuBLAS, which computes it
    otherwise, divides long sums by the number of rows."""
    if not x.is_cuda or not _kernels_are_ours(x.device, x.dtype):
        return False
    from tlora_megatron.ops.lora.cuda.operands import fit_gemm

    return fit_gemm(*weight_NK.shape)


@functools.cache
def _kernels_are_ours(device: torch.device, dtype: torch.dtype) -> bool:
    return kernel_choice(device, dtype).name == "cuda"


def _own_gemm(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    exactness: Exactness,
    bias_N: torch.Tensor | None,
    *,
    transposed: bool,
) -> torch.Tensor:
    from tlora_megatron.ops.lora.cuda.calls import gemm, multiprocessors
    from tlora_megatron.ops.lora.cuda.operands import gemm_tile

    out = x.new_empty(len(x), weight_NK.shape[0 if transposed else 1])
    tile = gemm_tile(exactness.row_budget, out.shape[1], multiprocessors(x.device) // 2)
    weight_NK = weight_NK.contiguous()
    gemm(x.contiguous(), weight_NK, out, tile, transposed=transposed, bias_N=bias_N)
    return out
